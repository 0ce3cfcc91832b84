// Data for the tensor view: related tensors (parameter, gradient, update, optimizer state, activations) and histograms.

import type { Hist, Lines, Site, Sites, SnapshotTensor } from "./api";
import type { Line } from "./chart";

const ORDER = ["param", "grad", "update", "optim", "act", "actgrad"];

/** Sites of the same parameter or module, including this one; parameters first, then activations. */
export function relatives(sites: Sites, site: Site): Site[] {
  const isWeight = site.kind === "param" || site.kind === "grad" || site.kind === "update" || site.kind === "optim";
  const found = sites.sites.filter((other) => {
    if (other.i === site.i) return true;
    if (other.kind === "act" || other.kind === "actgrad") return other.name === (isWeight ? site.owner : site.name);
    if (!isWeight) return other.owner === site.name && other.kind !== "optim";
    return other.name === site.name;
  });
  return found.sort((a, b) => rank(a.kind) - rank(b.kind) || a.order - b.order);
}

function rank(kind: string): number {
  const at = ORDER.indexOf(kind);
  return at < 0 ? ORDER.length : at;
}

/** The previous and next tensor of the same kind, in model order. */
export function neighbours(sites: Sites, site: Site): { previous: Site | null; next: Site | null; place: number; count: number } {
  const same = sites.sites.filter((other) => other.kind === site.kind);
  const place = same.findIndex((other) => other.i === site.i);
  return { previous: same[place - 1] ?? null, next: same[place + 1] ?? null, place, count: same.length };
}

/** One series divided by another at each step, e.g. |update| / |weight|. */
export function quotient(lines: Lines, above: number, below: number, label: string): Line | null {
  const [top, bottom] = [lines.series.find(({ i }) => i === above), lines.series.find(({ i }) => i === below)];
  if (!top || !bottom) return null;
  const y = Float64Array.from(top.values, (value, at) => (bottom.values[at]! > 0 ? value / bottom.values[at]! : NaN));
  return { label, x: lines.steps, y, nonfinite: Float64Array.from([...top.nonfinite, ...bottom.nonfinite]).sort() };
}

/** The tensors of a snapshot that belong to this site or its module. */
export function snapshotsOf(tensors: readonly SnapshotTensor[], site: Site): SnapshotTensor[] {
  const near = tensors.filter(({ i, site: name }) => i === site.i || name === site.name || name === site.owner);
  return near.sort((a, b) => Number(b.kind === site.kind && b.site === site.name) - Number(a.kind === site.kind && a.site === site.name));
}

export interface HistColumn {
  from: number;
  to: number;
  low: number;
  median: number;
  high: number;
  zeros: number;
  nonfinite: number;
}

/** A histogram as a table: 1 %, 50 % and 99 % quantiles as exponents of two, and fractions of zero and non-finite values. */
export function histColumns(hist: Hist, most = 24): HistColumn[] {
  const group = Math.max(1, Math.ceil(hist.num_columns / most));
  const found: HistColumn[] = [];
  for (let first = 0; first < hist.num_columns; first += group) {
    const end = Math.min(first + group, hist.num_columns);
    const bins = new Float64Array(hist.num_bins);
    let [total, zeros, nonfinite] = [0, 0, 0];
    for (let column = first; column < end; column++) {
      for (let bin = 0; bin < hist.num_bins; bin++) bins[bin]! += hist.counts[column * hist.num_bins + bin]!;
      total += hist.totals[column]!;
      zeros += hist.zeros[column]!;
      nonfinite += hist.nonfinite[column]!;
    }
    if (total === 0) continue;
    const at = (fraction: number): number => exponentAt(bins, fraction) + hist.min_exponent;
    found.push({
      from: hist.first + first * hist.steps_per_column, to: hist.first + end * hist.steps_per_column - 1,
      low: at(0.01), median: at(0.5), high: at(0.99), zeros: zeros / total, nonfinite: nonfinite / total,
    });
  }
  return found;
}

function exponentAt(bins: Float64Array, fraction: number): number {
  let left = fraction * bins.reduce((sum, count) => sum + count, 0);
  if (!(left > 0)) return NaN;
  for (let bin = 0; bin < bins.length; bin++) {
    left -= bins[bin]!;
    if (left <= 0) return bin;
  }
  return bins.length - 1;
}
