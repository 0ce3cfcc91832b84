// Converts a run's sites and findings to the rows and marks of its heatmap. Pure functions.

import type { Finding, Heat, Sites } from "./api";
import type { SiteMark } from "../components/heat/mark";

export interface RowList {
  readonly names: readonly string[];
  /** Site index of each row; -1 for rows that are modules (health). */
  readonly indices: readonly number[];
  readonly positionOf: (row: number, heat: Heat) => number;
}

export const HEALTH = "health";

export function siteRows(sites: Sites, kind: string): RowList {
  const found = sites.sites.filter((site) => site.kind === kind);
  const position = new Map(found.map((site, at) => [site.i, at]));
  return {
    names: found.map((site) => site.name),
    indices: found.map((site) => site.i),
    positionOf: (row, heat) => position.get(heat.rows[row]!) ?? -1,
  };
}

/** Rows of the health heatmap: modules, after a first row for the whole run. */
export function healthRows(heat: Heat): RowList {
  const names = heat.labels.map((label) => label || "(whole run)");
  const position = new Map(heat.labels.map((label, at) => [label, at]));
  return { names, indices: names.map(() => -1), positionOf: (row, other) => position.get(other.labels[row] ?? "") ?? -1 };
}

/** Marks for findings, each on the row of its site or on the first row of its module. */
export function findingMarks(findings: readonly Finding[], rows: RowList, sites: Sites, hrefOf: (n: number) => string): SiteMark[] {
  const exact = new Map(rows.names.map((name, at) => [name, at]));
  const inside = new Map<string, number>();
  rows.names.forEach((name, at) => {
    for (let dot = name.lastIndexOf("."); dot > 0; dot = name.lastIndexOf(".", dot - 1)) {
      const prefix = name.slice(0, dot);
      if (inside.has(prefix)) break;
      inside.set(prefix, at);
    }
  });
  const place = (site: string): number | undefined => exact.get(site) ?? inside.get(site) ?? exact.get(parent(site)) ?? inside.get(parent(site));
  return findings.filter(({ state }) => state !== "muted").flatMap((finding) => {
    const named = finding.sites.map((site, at) => sites.byIndex.get(finding.links[at] ?? -1)?.name ?? site.split("/").at(-1)!);
    const places = new Set(named.map(place).filter((at) => at !== undefined));
    return [...places].slice(0, 200).map((site) => ({
      site, step: finding.step, last: finding.last_step, severity: finding.severity, label: `${finding.rule}: ${finding.message}`, href: hrefOf(finding.n),
    }));
  });
}

const parent = (name: string): string => name.slice(0, Math.max(0, name.lastIndexOf(".")));

/** Folds as a URL parameter: "@2" for everything at a depth, otherwise the paths. */
export function writeFolds(folded: ReadonlySet<string>, depthOf: (depth: number) => ReadonlySet<string>): string {
  if (folded.size === 0) return "";
  for (const depth of [1, 2, 3, 4]) {
    const all = depthOf(depth);
    if (all.size === folded.size && [...all].every((path) => folded.has(path))) return `@${depth}`;
  }
  return [...folded].map(encodeURIComponent).join(",");
}

export function readFolds(text: string | null, depthOf: (depth: number) => Set<string>): Set<string> {
  if (!text) return new Set();
  if (/^@\d$/.test(text)) return depthOf(Number(text[1]));
  return new Set(text.split(",").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part; // a truncated URL still opens
    }
  }));
}
