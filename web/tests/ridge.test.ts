import assert from "node:assert/strict";
import { test } from "node:test";
import { chosenColumns, ridges, shares, usedBins } from "../src/lib/ridge";

const HISTOGRAMS = { counts: [0, 0, 1, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0], bins: 5, columns: 3 };

test("shares compare the shape of columns of different size; empty columns stay empty", () => {
  assert.deepEqual([...shares(HISTOGRAMS)], [0, 0, 0.25, 0.75, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
});

test("only bins in use are shown, with a margin", () => assert.deepEqual(usedBins(HISTOGRAMS), [1, 4]));

test("columns without a histogram are left out; first and last stay", () => {
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
