// Filtering, sorting and grouping of the list of runs. Pure functions.

import { num, type RunRow } from "./api";

export type Column = "name" | "status" | "loss" | "health" | "findings" | "overhead" | "steps" | "started" | "duration";

/** Whether a run matches all words of a filter. `lr=0.001` matches the config, `status:crashed` a single column. */
export function matches(run: RunRow, filter: string): boolean {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return true;
  const config = Object.entries(run.config).map(([key, value]) => `${key}=${value.replace(/^"|"$/g, "")}`);
  const text = [run.name, run.project, run.status, run.run_id, run.notes, ...run.tags, ...config].join("\n").toLowerCase();
  return words.every((word) => {
    const [, column, rest] = /^(status|project|tag|name):(.*)$/.exec(word) ?? [];
    if (!column || rest === undefined) return text.includes(word);
    const values = { status: [run.status], project: [run.project], tag: run.tags, name: [run.name] }[column] ?? [];
    return values.some((value) => value.toLowerCase().includes(rest));
  });
}

function sortKey(run: RunRow, column: Column): number | string {
  const { brief } = run;
  const last = (value: number | null | undefined): number => (value === null || value === undefined ? NaN : value);
  switch (column) {
    case "name":
      return run.name.toLowerCase();
    case "status":
      return run.status;
    case "loss":
      return num(brief?.loss?.last);
    case "health":
      return last(brief?.health);
    case "findings":
      return brief?.findings ? brief.findings.critical * 1e6 + brief.findings.warning * 1e3 + brief.findings.info : NaN;
    case "overhead":
      return last(brief?.overhead);
    case "steps":
      return run.last_step;
    case "started":
      return run.created;
    case "duration":
      return last(run.duration_s);
  }
}

/** Sort runs; unknown values come last in both directions. */
export function sorted(runs: readonly RunRow[], column: Column, descending: boolean): RunRow[] {
  const sign = descending ? -1 : 1;
  return runs
    .map((run) => ({ run, key: sortKey(run, column) }))
    .sort((a, b) => {
      if (typeof a.key === "string" || typeof b.key === "string") return sign * String(a.key).localeCompare(String(b.key));
      if (Number.isNaN(a.key) || Number.isNaN(b.key)) return Number(Number.isNaN(a.key)) - Number(Number.isNaN(b.key));
      return sign * (a.key - b.key) || b.run.created - a.run.created;
    })
    .map(({ run }) => run);
}

export interface Group {
  label: string;
  runs: RunRow[];
}

/** Group runs by project, status, tag or `config:lr`, in the order of the first run of each group. */
export function grouped(runs: readonly RunRow[], by: string): Group[] {
  if (!by) return [{ label: "", runs: [...runs] }];
  const groups = new Map<string, RunRow[]>();
  for (const run of runs) {
    for (const label of labels(run, by)) {
      const list = groups.get(label);
      if (list) list.push(run);
      else groups.set(label, [run]);
    }
  }
  return [...groups].map(([label, list]) => ({ label, runs: list }));
}

function labels(run: RunRow, by: string): string[] {
  if (by === "project") return [run.project || "No project"];
  if (by === "status") return [run.status];
  if (by === "tag") return run.tags.length ? run.tags : ["No tag"];
  const key = by.replace(/^config:/, "");
  const value = run.config[key];
  return [value === undefined ? `${key} not set` : `${key} = ${value}`];
}

/** Settings that are useful for grouping: neither the same in all runs nor different in all of them. */
export function groupKeys(runs: readonly RunRow[]): string[] {
  const values = new Map<string, Set<string>>();
  for (const run of runs) {
    for (const [key, value] of Object.entries(run.config)) {
      const seen = values.get(key);
      if (seen) seen.add(value);
      else values.set(key, new Set([value]));
    }
  }
  const limit = Math.max(2, runs.length * 0.8);
  return [...values].filter(([, seen]) => seen.size > 1 && seen.size <= limit).map(([key]) => key).sort();
}
