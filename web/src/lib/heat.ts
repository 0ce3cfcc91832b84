// The geometry of a heatmap: the visible range, zooming and panning, and pooling of rows. Pure functions without canvas,
// fetch or Svelte. For speed, loops over cells use only local variables. See colour.ts for the meaning of codes.

import { FIRST_CODE, LAST_CODE, MISSING, NOT_FINITE } from "./colour";

/** The visible range: steps [from, to) and rows [top, bottom); fractional while dragging. */
export interface View {
  readonly from: number;
  readonly to: number;
  readonly top: number;
  readonly bottom: number;
}

/** Codes of rows × columns: `codes[row * columns + column]`. */
export interface Codes {
  readonly codes: Uint8Array;
  readonly rows: number;
  readonly columns: number;
}

export interface Scale {
  /** Values of codes 1 and 254, as log10 if `isLog`. If lower is worse (health, entropy), `hi` is less than `lo`. */
  readonly lo: number;
  readonly hi: number;
  readonly isLog: boolean;
}

export interface Limits {
  readonly first: number;
  readonly end: number;
  readonly rows: number;
  /** Minimum number of visible steps and rows. */
  readonly minSteps?: number;
  readonly minRows?: number;
}

const clamp = (value: number, low: number, high: number): number => Math.min(high, Math.max(low, value));

/** The interval, resized to between `least` and the full range and moved inside [low, high). */
function inside(from: number, to: number, low: number, high: number, least: number): [number, number] {
  const size = clamp(to - from, Math.min(least, high - low), high - low);
  const start = clamp(from + (to - from - size) / 2, low, high - size);
  return [start, start + size];
}

export function clampView(view: View, limits: Limits): View {
  const end = Math.max(limits.end, limits.first + 1);
  const [from, to] = inside(view.from, view.to, limits.first, end, limits.minSteps ?? 4);
  const [top, bottom] = inside(view.top, view.bottom, 0, Math.max(limits.rows, 1), limits.minRows ?? 2);
  return { from, to, top, bottom };
}

export const wholeView = (limits: Limits): View =>
  clampView({ from: limits.first, to: limits.end, top: 0, bottom: limits.rows }, limits);

/** Zoom around a point given as fractions (0…1) of the view; a factor above 1 zooms out. */
export function zoom(view: View, factorX: number, factorY: number, atX: number, atY: number, limits: Limits): View {
  const [width, height] = [view.to - view.from, view.bottom - view.top];
  const from = view.from + atX * width * (1 - factorX);
  const top = view.top + atY * height * (1 - factorY);
  return clampView({ from, to: from + width * factorX, top, bottom: top + height * factorY }, limits);
}

/** Pan by fractions of the view. */
export function pan(view: View, fractionX: number, fractionY: number, limits: Limits): View {
  const [dx, dy] = [fractionX * (view.to - view.from), fractionY * (view.bottom - view.top)];
  return clampView(
    { from: view.from + dx, to: view.to + dx, top: view.top + dy, bottom: view.bottom + dy },
    limits,
  );
}

/** Follow a growing run: a view that included the end keeps including it; any other view stays unchanged. */
export function follow(view: View, oldEnd: number, limits: Limits): View {
  if (view.to < oldEnd - 1e-9 || limits.end <= oldEnd) return view;
  // A view of the whole run grows with it; a view of its end moves with it.
  const from = view.from <= limits.first ? limits.first : view.from + limits.end - oldEnd;
  return clampView({ ...view, from, to: limits.end }, limits);
}

export const sameView = (a: View, b: View): boolean =>
  a.from === b.from && a.to === b.to && a.top === b.top && a.bottom === b.bottom;

/** Conversions between steps or rows and pixels. */
export const toX = (step: number, view: View, width: number): number =>
  ((step - view.from) / (view.to - view.from)) * width;
export const toY = (row: number, view: View, height: number): number =>
  ((row - view.top) / (view.bottom - view.top)) * height;
export const stepAt = (x: number, view: View, width: number): number =>
  view.from + (x / width) * (view.to - view.from);
export const rowAt = (y: number, view: View, height: number): number =>
  view.top + (y / height) * (view.bottom - view.top);

/** The column that contains a step, for columns that begin at `starts` (ascending); -1 before the first. */
export function columnOf(starts: ArrayLike<number>, step: number): number {
  let [low, high] = [0, starts.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle]! <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Priority of codes that share a cell: the largest first, or for ratios (where 128 is "equal") the furthest from equal. */
export type Rank = Int16Array;
export const LARGEST: Rank = Int16Array.from({ length: 256 }, (_, code) => code);
export const FURTHEST: Rank = LARGEST.map((code) => {
  if (code === MISSING) return -1;
  return code === NOT_FINITE ? 999 : Math.abs(code - 128);
});

/**
 * Merge each group of tile rows into one row with the highest-ranked code of each column. NaN (255) always wins, and missing
 * (0) never hides a value. Group g is members[starts[g] … starts[g + 1]).
 */
export function pool(tile: Codes, members: Int32Array, starts: Int32Array, rank: Rank = LARGEST): Codes {
  const { codes, columns } = tile;
  const rows = starts.length - 1;
  const pooled = new Uint8Array(rows * columns);
  for (let group = 0; group < rows; group++) {
    const target = group * columns;
    const end = starts[group + 1]!;
    for (let at = starts[group]!; at < end; at++) {
      const source = members[at]! * columns;
      if (source < 0) continue;
      for (let column = 0; column < columns; column++) {
        const code = codes[source + column]!;
        if (rank[code]! > rank[pooled[target + column]!]!) pooled[target + column] = code;
      }
    }
  }
  return { codes: pooled, rows, columns };
}

/** Convert codes to pixels. */
export function paint(tile: Codes, colours: Uint32Array): ImageData {
  const image = new ImageData(Math.max(tile.columns, 1), Math.max(tile.rows, 1));
  const pixels = new Uint32Array(image.data.buffer);
  const { codes } = tile;
  const count = Math.min(codes.length, pixels.length);
  for (let at = 0; at < count; at++) pixels[at] = colours[codes[at]!]!;
  return image;
}

/** The value of a code; NaN for missing and non-finite values. */
export function valueOf(code: number, scale: Scale): number {
  if (code === MISSING || code === NOT_FINITE) return Number.NaN;
  const fraction = (code - FIRST_CODE) / (LAST_CODE - FIRST_CODE);
  const value = scale.lo + fraction * (scale.hi - scale.lo);
  return scale.isLog ? 10 ** value : value;
}

/** Ticks of a legend: powers of ten on a log scale, otherwise evenly spaced. */
export function legendTicks(scale: Scale, most = 6): number[] {
  const span = scale.hi - scale.lo;
  if (!Number.isFinite(span)) return [];
  if (span === 0) return [scale.isLog ? 10 ** scale.lo : scale.lo];
  if (!scale.isLog || span < 1.5) {
    const count = Math.min(most, 4);
    const at = Array.from({ length: count }, (_, i) => scale.lo + (span * i) / (count - 1));
    return scale.isLog ? at.map((exponent) => 10 ** exponent) : at;
  }
  const every = Math.max(1, Math.ceil(span / most));
  const ticks: number[] = [];
  for (let exponent = Math.ceil(scale.lo / every) * every; exponent <= scale.hi; exponent += every) ticks.push(10 ** exponent);
  return ticks;
}

/** The labels that fit between two positions (px) without touching; those in the middle take precedence. */
export function fittingLabels<T extends { x: number; width: number }>(labels: readonly T[], from: number, to: number, gap = 8): T[] {
  const middle = (from + to) / 2;
  const kept: T[] = [];
  for (const label of [...labels].sort((a, b) => Math.abs(a.x - middle) - Math.abs(b.x - middle))) {
    const isInside = label.x - label.width / 2 >= from + gap && label.x + label.width / 2 <= to - gap;
    if (isInside && kept.every((other) => Math.abs(other.x - label.x) >= (other.width + label.width) / 2 + gap)) kept.push(label);
  }
  return kept;
}

/** The position of a value on the scale (0…1). */
export function fractionOf(value: number, scale: Scale): number {
  const at = scale.isLog ? Math.log10(value) : value;
  return scale.hi !== scale.lo ? (at - scale.lo) / (scale.hi - scale.lo) : 0.5;
}

/** Round ticks for a step axis: multiples of 1, 2 or 5 times a power of ten, integers only. */
export function stepTicks(from: number, to: number, most: number): number[] {
  const raw = Math.max((to - from) / Math.max(most, 1), 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const every = Math.max(1, Math.round([1, 2, 5, 10].find((factor) => factor * power >= raw)! * power));
  const ticks: number[] = [];
  for (let step = Math.ceil(from / every) * every; step < to; step += every) ticks.push(step);
  return ticks;
}
