import assert from "node:assert/strict";
import { test } from "node:test";
import type { RunEvent } from "../src/lib/api";
import { folded } from "../src/lib/events";

const event = (step: number, message: string, type = "nonfinite"): RunEvent => ({ time: step, step, type, severity: "critical", message, details: null });

test("neighbours that differ only in their numbers are folded, newest first", () => {
  const events = [event(1, "NaN at step 1"), event(3, "NaN at step 3"), event(5, "NaN at step 5"), event(6, "the disk is full", "disk"), event(7, "NaN at step 7")];
  const found = folded(events).map(({ event, count, first_step }) => [event.step, count, first_step]);
  assert.deepEqual(found, [[7, 1, 7], [6, 1, 6], [5, 3, 1]]);
});

test("events of other places or severities stay apart", () => {
  assert.equal(folded([event(1, "NaN in encoder"), event(2, "NaN in decoder")]).length, 2);
  assert.equal(folded([event(1, "NaN"), { ...event(2, "NaN"), severity: "info" }]).length, 2);
  assert.deepEqual(folded([]), []);
});
