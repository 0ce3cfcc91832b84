import assert from "node:assert/strict";
import { test } from "node:test";
import { align, bands, logTicks, tickLabels, wantsLog, yRange, type Line } from "../src/lib/chart";

const line = (x: number[], y: number[], nonfinite: number[] = []): Line => ({ label: "a", x, y, nonfinite });

test("a line passes over missing steps and has a gap at non-finite values", () => {
  const data = align([line([0, 1, 2, 3], [1, NaN, NaN, 4], [2])], false);
  assert.deepEqual(data[1], [1, undefined, null, 4]);
});

test("a log axis omits zero and negative values", () => {
  assert.deepEqual(align([line([0, 1, 2], [1, 0, -1])], true)[1], [1, null, null]);
});

test("lines with different steps share one axis", () => {
  const data = align([line([0, 2], [1, 2]), line([1, 2], [3, 4])], false);
  assert.deepEqual(Array.from(data[0]), [0, 1, 2]);
});

test("log ticks are few, inside the range, and exist for narrow ranges", () => {
  for (const [lo, hi] of [[1e-12, 1e3], [1e-5, 3e-5], [0.2, 7], [1e-300, 1e300]] as const) {
    const ticks = logTicks(lo, hi);
    assert.ok(ticks.every((tick) => tick >= lo && tick <= hi), `${lo} ${hi}: ${ticks}`);
    assert.ok(ticks.length >= 1 && ticks.length <= 9, `${lo} ${hi}: ${ticks}`);
  }
  assert.deepEqual(logTicks(0, 1), []);
});

test("neighbouring ticks have different labels", () => {
  for (const ticks of [[1e-5, 2e-5, 3e-5], [1.0001, 1.0002, 1.0003], [0, 0.0005, 0.001], [100000, 100500]]) {
    assert.equal(new Set(tickLabels(ticks)).size, ticks.length, String(tickLabels(ticks)));
  }
});

test("a constant line still has a range", () => {
  for (const [lo, hi] of [yRange(3, 3, false), yRange(0, 0, false), yRange(3, 3, true), yRange(null, null, true)]) assert.ok(hi > lo);
});

test("a log axis is chosen for values over several decades", () => {
  assert.equal(wantsLog([line([0, 1], [1e-5, 1])]), true);
  assert.equal(wantsLog([line([0, 1], [1, 2])]), false);
  assert.equal(wantsLog([line([0, 1], [-1, 1000])]), false);
});

test("ticks 2.5 apart are not rounded to integers", () => {
  assert.deepEqual(tickLabels([2.5, 5, 7.5]), ["2.5", "5.0", "7.5"]);
  assert.deepEqual(tickLabels([0.0009, 0.001, 0.0011]), ["0.0009", "0.0010", "0.0011"]);
});

test("overlapping bands are merged", () => {
  const mark = (step: number, last: number) => ({ step, last, severity: "warning" as const, label: "" });
  assert.deepEqual(bands([mark(0, 10), mark(3, 12), mark(20, 30), mark(5, 5)]).map(({ from, to }) => [from, to]), [[0, 12], [20, 30]]);
});
