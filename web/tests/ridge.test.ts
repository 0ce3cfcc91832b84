import assert from "node:assert/strict";
import { test } from "node:test";
import { chosenColumns, fractions, ridges, usedBins } from "../src/lib/ridge";

const HISTOGRAMS = { counts: [0, 0, 1, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0], bins: 5, columns: 3 };

test("fractions normalise columns of different sizes; empty columns stay empty", () => {
  assert.deepEqual([...fractions(HISTOGRAMS)], [0, 0, 0.25, 0.75, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
});

test("only non-empty bins are shown, with a margin", () => assert.deepEqual(usedBins(HISTOGRAMS), [1, 4]));

test("empty columns are skipped; the first and last are kept", () => {
  assert.deepEqual(chosenColumns(HISTOGRAMS, 10), [0, 2]);
  const many = { counts: new Array(100).fill(1), bins: 1, columns: 100 };
  const chosen = chosenColumns(many, 7);
  assert.deepEqual([chosen.length, chosen[0], chosen[6]], [7, 0, 99]);
});

test("ridges stay inside their canvas", () => {
  const drawn = ridges(HISTOGRAMS, [0, 2], 100);
  for (const ridge of drawn) {
    assert.ok(ridge.base <= 100);
    assert.ok(ridge.base - Math.max(...ridge.heights) >= 0);
  }
});
