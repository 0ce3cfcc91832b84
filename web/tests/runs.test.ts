import assert from "node:assert/strict";
import { test } from "node:test";
import type { RunRow } from "../src/lib/api";
import { healthyRange } from "../src/lib/healthy";
import { grouped, groupKeys, matches, sorted } from "../src/lib/runs";

function row(name: string, more: Partial<RunRow> = {}): RunRow {
  return {
    id: name, run_id: name, project: "p", name, status: "finished", reason: "", created: 0, ended: null, duration_s: null, last_step: 0,
    tags: [], notes: "", config: {}, brief: null, ...more,
  };
}
const brief = (last: number | "NaN") => ({ last_step: 1, loss: { name: "loss", last, steps: [], values: [] }, health: null, findings: { critical: 0, warning: 0, info: 0 }, overhead: null });

test("all words of a filter must match, including settings", () => {
  const run = row("gpt small", { tags: ["night"], config: { lr: "0.001", "optimizer.name": '"adamw"' } });
  for (const filter of ["", "GPT", "gpt night", "lr=0.001", "name=adamw", "status:fin", "tag:night"]) assert.ok(matches(run, filter), filter);
  for (const filter of ["gpt large", "status:crashed", "lr=0.01x"]) assert.ok(!matches(run, filter), filter);
});

test("unknown losses come last in both directions", () => {
  const runs = [row("a"), row("b", { brief: brief(2) }), row("c", { brief: brief("NaN") }), row("d", { brief: brief(1) })];
  assert.deepEqual(sorted(runs, "loss", false).map(({ name }) => name).slice(0, 2), ["d", "b"]);
  assert.deepEqual(sorted(runs, "loss", true).map(({ name }) => name).slice(0, 2), ["b", "d"]);
});

test("grouping by a setting, and the settings offered for it", () => {
  const runs = ["1", "1", "2"].map((lr, n) => row(String(n), { config: { lr, seed: String(n), dim: "8" } }));
  assert.deepEqual(grouped(runs, "config:lr").map(({ label, runs: list }) => [label, list.length]), [["lr = 1", 2], ["lr = 2", 1]]);
  assert.deepEqual(groupKeys(runs), ["lr"]);
});

test("healthy ranges are parsed if they are plain numbers", () => {
  assert.deepEqual(healthyRange("0.2 to 3.3"), [0.2, 3.3]);
  assert.deepEqual(healthyRange("below 1e4"), [-Infinity, 1e4]);
  assert.deepEqual(healthyRange("at least 1,000"), [1000, Infinity]);
  assert.equal(healthyRange("about 1"), undefined);
});
