// Data for the flow view: gradients along the depth of a model, and scalars as heatmaps. Pure functions.

import type { Flow, Heat, Lines } from "./api";
import { FIRST_CODE, LAST_CODE, NOT_FINITE } from "./colour";
import type { Scale } from "./heat";
import { buildTree, visibleRows } from "./tree";

export type Table = "pressure" | "rms" | "peak" | "act_rms";

/** The columns that contain data. */
export function filledColumns(flow: Flow, table: Table): number[] {
  const found: number[] = [];
  for (let column = 0; column < flow.num_columns; column++)
    for (let layer = 0; layer < flow.layers.length; layer++)
      if (!Number.isNaN(valueAt(flow, table, layer, column))) {
        found.push(column);
        break;
      }
  return found;
}

/** The value of a layer; Infinity if all its elements were non-finite, NaN if it was not recorded. */
function valueAt(flow: Flow, table: Table, layer: number, column: number): number {
  const value = flow[table][layer * flow.num_columns + column]!;
  return Number.isNaN(value) && hasNonfinite(flow, table, layer, column) ? Infinity : value;
}

/** Whether some of a layer's elements were NaN or infinite; its value then covers the others. */
export function hasNonfinite(flow: Flow, table: Table, layer: number, column: number): boolean {
  const at = layer * flow.num_columns + column;
  return table === "act_rms" ? flow.act_odd[at] === 1 : flow.peak[at] === Infinity;
}

/** If most layers are non-finite at `at`, the index in `columns` of the last fully finite one before it; otherwise null. */
export function lastFinite(flow: Flow, table: Table, columns: readonly number[], at: number): number | null {
  const numOdd = (place: number): number => flow.layers.filter((_, layer) => hasNonfinite(flow, table, layer, columns[place]!)).length;
  if (at < 0 || numOdd(at) * 2 < flow.layers.length) return null;
  for (let place = at - 1; place >= 0; place--) if (numOdd(place) === 0) return place;
  return null;
}

/** The order of layers with those of a module together, including modules that are never called directly. */
export function depthOrder(flow: Flow): number[] {
  return visibleRows(buildTree(flow.layers.map(({ path }) => path)), new Set()).flatMap(({ node }) => node.sites);
}

export interface HeadRows {
  readonly stat: "entropy" | "max_logit";
  readonly rows: { name: string; scalar: number }[];
}

const HEAD = /^(?:.*\/)?attention_(entropy|max_logit)\/(.+)\.head_(\d+)$/;

/** Metrics per head that a ModuleMonitor logged: `attention_entropy/layers.0.attn.head_3`. */
export function headRows(scalars: readonly { i: number; name: string }[]): HeadRows[] {
  const found = scalars.flatMap(({ i, name }) => {
    const match = HEAD.exec(name);
    return match ? [{ stat: match[1] as HeadRows["stat"], name: `${match[2]}.head ${match[3]}`, scalar: i }] : [];
  });
  return (["entropy", "max_logit"] as const).map((stat) => ({ stat, rows: found.filter((row) => row.stat === stat) })).filter(({ rows }) => rows.length > 0);
}

/** Entropy per head recorded by `inspect=`: `attn/<site>/entropy_3`, ordered by site and head. */
export function inspectedHeads(attention: readonly { path: string; stats: Readonly<Record<string, number>> }[]): { name: string; scalar: number }[] {
  return attention.flatMap(({ path, stats }) =>
    Object.entries(stats)
      .flatMap(([stat, scalar]) => {
        const head = /^entropy_(\d+)$/.exec(stat)?.[1];
        return head === undefined ? [] : [{ head: Number(head), scalar }];
      })
      .sort((a, b) => a.head - b.head)
      .map(({ head, scalar }) => ({ name: `${path}.head ${head}`, scalar })),
  );
}

/** The gradient that remains at each time step of a recurrent layer: `rnn/<site>/profile_3`, in order. */
export function timeProfiles(recurrent: readonly { path: string; stats: Readonly<Record<string, number>> }[]): { name: string; scalar: number }[] {
  return recurrent.flatMap(({ path, stats }) => {
    const stops = Object.entries(stats)
      .flatMap(([stat, scalar]) => {
        const stop = /^profile_(\d+)$/.exec(stat)?.[1];
        return stop === undefined ? [] : [{ stop: Number(stop), scalar }];
      })
      .sort((a, b) => a.stop - b.stop);
    const last = Math.max(stops.length - 1, 1);
    return stops.map(({ stop, scalar }) => ({ name: `${path}.at ${Math.round((100 * stop) / last)} % of the sequence`, scalar }));
  });
}

export const stepOf = (flow: Flow, column: number): number => flow.first + column * flow.steps_per_column;

/** One value per layer, in the given order. */
export function profile(flow: Flow, table: Table, column: number, order: readonly number[]): Float64Array {
  return Float64Array.from(order, (layer) => valueAt(flow, table, layer, column));
}

/** The index in `columns` of the last one at or before a step; the latest for null. */
export function nearest(flow: Flow, columns: readonly number[], step: number | null): number {
  if (step === null) return columns.length - 1;
  const at = columns.findLastIndex((column) => stepOf(flow, column) <= step);
  return Math.max(at, 0);
}

/**
 * Relative pipe widths from 0 to 1 on a log scale over at most eight decades below the maximum. NaN for a layer without
 * a value, a thin line for a layer without pressure.
 */
export function pipeWidths(pressure: ArrayLike<number>): Float64Array {
  const positive = Array.from(pressure).filter((value) => value > 0 && Number.isFinite(value));
  const high = Math.log10(Math.max(...positive, 1e-300));
  const low = Math.max(Math.log10(Math.min(...positive, 1e300)), high - 8);
  const span = Math.max(high - low, 1);
  return Float64Array.from({ length: pressure.length }, (_, at) => {
    const value = pressure[at]!;
    if (Number.isNaN(value)) return NaN;
    if (value === Infinity) return 1;
    if (!(value > 0)) return 0.02;
    return Math.min(1, Math.max(0.04, 0.08 + 0.92 * (1 - (high - Math.log10(value)) / span)));
  });
}

/** The range of all values, widened if they are equal. */
export function rangeOf(lines: Lines, isLog: boolean): Scale {
  let [lo, hi] = [Infinity, -Infinity];
  for (const { values } of lines.series)
    for (const value of values) {
      if (!Number.isFinite(value) || (isLog && value <= 0)) continue;
      const at = isLog ? Math.log10(value) : value;
      if (at < lo) lo = at;
      if (at > hi) hi = at;
    }
  if (lo > hi) return { lo: 0, hi: 1, isLog };
  return lo === hi ? { lo: lo - 0.5, hi: hi + 0.5, isLog } : { lo, hi, isLog };
}

/**
 * For values recorded at intervals, the column that each column takes its value from: itself, or the last one before it
 * within the usual interval. -1 in longer gaps, which stay empty.
 */
export function heldFrom(isFilled: (column: number) => boolean, columns: number): Int32Array {
  const filled = Array.from({ length: columns }, (_, column) => column).filter(isFilled);
  const gaps = filled.slice(1).map((column, n) => column - filled[n]!).sort((a, b) => a - b);
  const usual = gaps[Math.max(0, Math.ceil(gaps.length * 0.95) - 1)] ?? 1;
  const from = new Int32Array(columns).fill(-1);
  for (const column of filled) for (let at = column; at < Math.min(column + usual, columns); at++) from[at] = column;
  return from;
}

/** Lines as a heatmap like the server's: one row per series, at most `w` columns, the highest code in each cell. */
export function heatOfLines(lines: Lines, scale: Scale, w: number, first: number, end: number): Heat {
  const per = Math.max(1, Math.ceil((end - first) / Math.max(w, 1)));
  const columns = Math.max(1, Math.ceil((end - first) / per));
  const codes = new Uint8Array(lines.series.length * columns);
  const put = (row: number, step: number, code: number): void => {
    const column = Math.floor((step - first) / per);
    if (column < 0 || column >= columns) return;
    const at = row * columns + column;
    if (code > codes[at]!) codes[at] = code;
  };
  lines.series.forEach(({ values, nonfinite }, row) => {
    values.forEach((value, n) => {
      if (Number.isNaN(value)) return;
      const at = scale.isLog ? Math.log10(Math.max(value, 1e-300)) : value;
      const fraction = (at - scale.lo) / (scale.hi - scale.lo);
      put(row, lines.steps[n]!, FIRST_CODE + Math.round((LAST_CODE - FIRST_CODE) * Math.min(1, Math.max(0, fraction))));
    });
    nonfinite.forEach((step) => put(row, step, NOT_FINITE));
  });
  for (let row = 0; row < lines.series.length; row++) {
    const own = codes.slice(row * columns, (row + 1) * columns);
    heldFrom((column) => own[column] !== 0, columns).forEach((from, column) => from >= 0 && (codes[row * columns + column] = own[from]!));
  }
  return {
    last_step: lines.last_step, kind: "", stat: "", scale: scale.isLog ? "log10" : "linear", lo: scale.lo, hi: scale.hi,
    is_exact: true, retry_ms: 0, first, steps_per_column: per, num_columns: columns, num_rows: lines.series.length,
    rows: Int32Array.from(lines.series, () => -1), labels: lines.series.map(({ name }) => name), codes,
  };
}
