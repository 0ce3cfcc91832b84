import assert from "node:assert/strict";
import { test } from "node:test";
import type { Flow, Lines } from "../src/lib/api";
import { depthOrder, filledColumns, hasNonfinite, headRows, heatOfLines, inspectedHeads, lastFinite, nearest, pipeWidths, profile, rangeOf, stepOf, timeProfiles } from "../src/lib/flow";

const FLOW = {
  first: 100, steps_per_column: 10, num_columns: 3, layers: [{ path: "a" }, { path: "b" }],
  pressure: Float32Array.from([1, NaN, 2, NaN, NaN, 4]), peak: Float32Array.from([1, NaN, 2, Infinity, NaN, 4]),
} as unknown as Flow;

test("only recorded columns can be selected", () => {
  assert.deepEqual(filledColumns(FLOW, "pressure"), [0, 2]);
  assert.equal(stepOf(FLOW, 2), 120);
  assert.deepEqual([...profile(FLOW, "pressure", 2, [1, 0])], [4, 2]);
  // All elements are NaN, which must not look like missing data.
  assert.deepEqual([...profile(FLOW, "pressure", 0, [0, 1])], [1, Infinity]);
  assert.deepEqual([nearest(FLOW, [0, 2], 115), nearest(FLOW, [0, 2], 999), nearest(FLOW, [0, 2], 1), nearest(FLOW, [0, 2], null)], [0, 1, 0, 1]);
});

test("a partly NaN layer keeps its value and is marked", () => {
  const flow = {
    num_columns: 3, layers: [{ path: "a" }, { path: "b" }], pressure: Float32Array.from([1, 2, 0, 1, NaN, NaN]),
    peak: Float32Array.from([1, 2, Infinity, 1, Infinity, Infinity]), act_rms: Float32Array.from([1, NaN, NaN, 1, 1, 1]), act_odd: Uint8Array.from([0, 1, 0, 0, 1, 0]),
  } as unknown as Flow;
  assert.deepEqual([...profile(flow, "pressure", 2, [0, 1])], [0, Infinity]);
  assert.deepEqual([hasNonfinite(flow, "pressure", 0, 2), hasNonfinite(flow, "act_rms", 0, 2)], [true, false]);
  assert.deepEqual([...profile(flow, "act_rms", 1, [0, 1])], [Infinity, 1]);
  // From an all-NaN column back to the last fully finite one.
  assert.deepEqual([0, 1, 2].map((at) => lastFinite(flow, "pressure", [0, 1, 2], at)), [null, 0, 0]);
});

test("pipe widths: full for the maximum, thin for zero, NaN for missing", () => {
  const widths = pipeWidths([1, 1e-3, 0, NaN, Infinity, 1e-12]);
  assert.equal(widths[0], 1);
  assert.ok(widths[1]! < 1 && widths[1]! > widths[2]!);
  assert.ok(Number.isNaN(widths[3]!));
  assert.equal(widths[4], 1);
  assert.ok(widths[5]! >= 0.02);
  assert.deepEqual([...pipeWidths([5, 5])], [1, 1]);
  assert.deepEqual([...pipeWidths([])], []);
});

const LINES = {
  last_step: 9, steps: Float64Array.from([0, 1, 5, 9]),
  series: [{ i: 0, name: "attn", values: Float64Array.from([1, 0.5, 0, NaN]), nonfinite: Float64Array.from([9]) }],
} as unknown as Lines;

test("a heatmap of lines keeps the most important value of each cell", () => {
  const low = heatOfLines(LINES, { lo: 1, hi: 0, isLog: false }, 5, 0, 10);
  assert.deepEqual([low.num_columns, low.steps_per_column], [5, 2]);
  // Entropy 1 and 0.5 share a column: the lower one is shown until the next value, 0 at step 5. NaN at step 9.
  assert.deepEqual([...low.codes], [128, 128, 254, 254, 255]);
});

test("a value is held until the next one is due, and a longer gap stays empty", () => {
  const sparse = { last_step: 99, steps: Float64Array.from([0, 10, 20, 30, 90]), series: [{ values: [1, 1, 1, 1, 1], nonfinite: [] }] } as unknown as Lines;
  const many = { ...sparse, steps: Float64Array.from([...Array(40).keys()].map((n) => 2 * n).concat([99])), series: [{ values: new Array(41).fill(1), nonfinite: [] }] } as unknown as Lines;
  const codes = heatOfLines(many, { lo: 0, hi: 1, isLog: false }, 100, 0, 100).codes;
  assert.ok(codes.slice(0, 80).every((code) => code === 254));
  assert.ok(codes.slice(81, 98).every((code) => code === 0));
  assert.ok(heatOfLines(sparse, { lo: 0, hi: 1, isLog: false }, 100, 0, 100).codes.slice(0, 30).every((code) => code === 254));
});

test("layers that are never called directly are placed next to their siblings", () => {
  const flow = { layers: ["embed", "blocks.0.norm", "blocks.1.norm", "head", "blocks.0.out"].map((path) => ({ path })) } as unknown as Flow;
  assert.deepEqual(depthOrder(flow), [0, 1, 4, 2, 3]);
});

test("inspected heads are in order", () => {
  const attention = [{ path: "h.0", stats: { entropy: 1, entropy_10: 2, entropy_min: 3, entropy_2: 4 } }, { path: "h.1", stats: { entropy: 5 } }];
  assert.deepEqual(inspectedHeads(attention), [{ name: "h.0.head 2", scalar: 4 }, { name: "h.0.head 10", scalar: 2 }]);
});

test("time steps of a recurrent layer are in order", () => {
  const recurrent = [{ path: "lstm", stats: { reach: 1, profile_2: 2, profile_0: 3, profile_1: 4 } }];
  assert.deepEqual(timeProfiles(recurrent).map(({ name, scalar }) => [name, scalar]), [
    ["lstm.at 0 % of the sequence", 3], ["lstm.at 50 % of the sequence", 4], ["lstm.at 100 % of the sequence", 2],
  ]);
});

test("heads are found among the scalars that a monitor logged", () => {
  const names = ["loss", "attention_entropy/h.0.attn.head_0", "attention_entropy/h.0.attn.head_11", "monitor/attention_max_logit/h.0.head_2", "attention_entropy/h"];
  const found = headRows(names.map((name, i) => ({ i, name })));
  assert.deepEqual(found.map(({ stat, rows }) => [stat, rows.map(({ name, scalar }) => [name, scalar])]), [
    ["entropy", [["h.0.attn.head 0", 1], ["h.0.attn.head 11", 2]]],
    ["max_logit", [["h.0.head 2", 3]]],
  ]);
});

test("the range of no values and of one value is not empty", () => {
  assert.deepEqual(rangeOf({ series: [] } as unknown as Lines, true), { lo: 0, hi: 1, isLog: true });
  assert.deepEqual(rangeOf({ series: [{ values: [100, NaN, -1] }] } as unknown as Lines, true), { lo: 1.5, hi: 2.5, isLog: true });
});
