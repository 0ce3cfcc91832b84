import assert from "node:assert/strict";
import { test } from "node:test";
import { FURTHEST, clampView, columnOf, fittingLabels, follow, legendTicks, pan, pool, fractionOf, stepTicks, valueOf, wholeView, zoom } from "../src/lib/heat";

const LIMITS = { first: 0, end: 1000, rows: 40 };

test("zooming keeps the point under the cursor in place", () => {
  const view = zoom(wholeView(LIMITS), 0.5, 0.5, 0.25, 0.75, LIMITS);
  assert.equal(view.from + 0.25 * (view.to - view.from), 250);
  assert.equal(view.top + 0.75 * (view.bottom - view.top), 30);
});

test("panning never leaves the run", () => {
  const view = pan(zoom(wholeView(LIMITS), 0.1, 0.1, 0.5, 0.5, LIMITS), 50, -50, LIMITS);
  assert.equal(view.to, 1000);
  assert.equal(view.top, 0);
  assert.equal(Math.round(view.to - view.from), 100);
});

test("zoom is limited to a few steps and to the whole run", () => {
  let view = wholeView(LIMITS);
  for (let i = 0; i < 60; i++) view = zoom(view, 0.5, 0.5, 0.5, 0.5, LIMITS);
  assert.equal(view.to - view.from, 4);
  assert.equal(view.bottom - view.top, 2);
  for (let i = 0; i < 60; i++) view = zoom(view, 2, 2, 0.1, 0.9, LIMITS);
  assert.deepEqual(view, wholeView(LIMITS));
});

test("a run with one step and one row can be shown", () => {
  const tiny = { first: 7, end: 8, rows: 1 };
  assert.deepEqual(clampView({ from: 0, to: 100, top: 0, bottom: 9 }, tiny), { from: 7, to: 8, top: 0, bottom: 1 });
});

test("a growing run moves the view only if it includes the end", () => {
  const grown = { ...LIMITS, end: 1100 };
  const early = { from: 100, to: 200, top: 0, bottom: 40 };
  assert.equal(follow(early, 1000, grown), early);
  assert.deepEqual(follow({ ...early, from: 900, to: 1000 }, 1000, grown), { ...early, from: 1000, to: 1100 });
  assert.equal(follow(wholeView(LIMITS), 1000, grown).from, 0);
  assert.equal(follow(wholeView(LIMITS), 1000, grown).to, 1100);
});

test("pooling rows never hides a NaN, and a missing value never hides another", () => {
  const tile = { codes: Uint8Array.from([10, 0, 0, 5, 255, 0]), rows: 2, columns: 3 };
  const pooled = pool(tile, Int32Array.from([0, 1, -1]), Int32Array.from([0, 3]));
  assert.deepEqual([...pooled.codes], [10, 255, 0]);
});

test("pooling ratios keeps the one furthest from equal", () => {
  const tile = { codes: Uint8Array.from([130, 0, 128, 100, 140, 255]), rows: 2, columns: 3 };
  const pooled = pool(tile, Int32Array.from([0, 1]), Int32Array.from([0, 2]), FURTHEST);
  assert.deepEqual([...pooled.codes], [100, 140, 255]);
});

test("the column of a step is the last one that starts at or before it", () => {
  assert.deepEqual([-1, 0, 9, 10, 25, 999].map((step) => columnOf([0, 10, 20], step)), [-1, 0, 0, 1, 2, 2]);
});

test("codes convert back to values at both ends of the scale", () => {
  const scale = { lo: -6, hi: 2, isLog: true };
  assert.ok(Math.abs(valueOf(1, scale) - 1e-6) < 1e-18);
  assert.ok(Math.abs(valueOf(254, scale) - 100) < 1e-9);
  assert.ok(Number.isNaN(valueOf(0, scale)) && Number.isNaN(valueOf(255, scale)));
  assert.ok(Math.abs(fractionOf(0.01, scale) - 0.5) < 1e-12);
  assert.equal(fractionOf(25, { lo: 100, hi: 0, isLog: false }), 0.75);
});

test("legends use powers of ten where possible", () => {
  assert.deepEqual(legendTicks({ lo: -6.3, hi: 2.1, isLog: true }).map(Math.log10).map(Math.round), [-6, -4, -2, 0, 2]);
  assert.equal(legendTicks({ lo: 0, hi: 1, isLog: false }).length, 4);
  assert.deepEqual(legendTicks({ lo: Number.NaN, hi: 1, isLog: true }), []);
});

test("labels of a legend never touch, and the middle one stays", () => {
  const labels = [40, 100, 150, 200, 260].map((x) => ({ x, width: 60 }));
  assert.deepEqual(fittingLabels(labels, 30, 270).map(({ x }) => x), [150]);
  assert.deepEqual(fittingLabels(labels.map(({ x }) => ({ x, width: 30 })), 10, 290).map(({ x }) => x).sort((a, b) => a - b), [40, 100, 150, 200, 260]);
  assert.deepEqual(fittingLabels(labels, 140, 160), []);
});

test("step axes have round integer ticks", () => {
  assert.deepEqual(stepTicks(0, 1000, 5), [0, 200, 400, 600, 800]);
  assert.deepEqual(stepTicks(10.2, 14.1, 10), [11, 12, 13, 14]);
});
