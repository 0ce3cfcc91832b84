import assert from "node:assert/strict";
import { test } from "node:test";
import { checksRun, checksSkipped } from "../src/lib/checks";

const ALL = { num_rules: 66, blind: [], failed: [], gaps: [] };

test("the checks that ran, in the singular and the plural", () => {
  assert.equal(checksRun(ALL), "66 checks ran.");
  assert.equal(checksRun({ ...ALL, num_rules: 1 }, 1), "1 check ran on 1 step.");
  assert.equal(checksRun({ ...ALL, blind: ["a", "b"], failed: ["c"] }, 1200), "63 checks ran on 1,200 steps. 2 had no data. 1 failed.");
  assert.equal(checksRun({ ...ALL, num_rules: 0 }), "");
});

test("the checks that did not run", () => {
  assert.equal(checksSkipped(ALL), "");
  assert.equal(checksSkipped({ ...ALL, gaps: ["no validation loss"], blind: ["a"] }), "1 signal not recorded · 1 of 66 checks had no data");
  assert.equal(checksSkipped({ ...ALL, failed: ["a", "b"] }), "2 checks failed");
});
