// The maths of a heatmap: what part of a run is looked at, how tile cells map to it, and how rows pool into pixels.
// Pure: no canvas, no fetch, no Svelte. Loops over cells run on plain locals (see colour.ts for what codes mean).

import { FIRST_CODE, LAST_CODE, MISSING, NOT_FINITE } from "./colour";

/** What is looked at: steps [from, to) and visible rows [top, bottom); fractions while a hand is dragging. */
export interface View {
  readonly from: number;
  readonly to: number;
  readonly top: number;
  readonly bottom: number;
}

/** Codes of some rows over some steps, as the server pooled them: `codes[row * columns + column]`. */
export interface Codes {
  readonly codes: Uint8Array;
  readonly rows: number;
  readonly columns: number;
}

export interface Scale {
  /** log10 of the values at codes 1 and 254 (the values themselves when `isLog` is false); hi below lo for health. */
  readonly lo: number;
  readonly hi: number;
  readonly isLog: boolean;
}

export interface Limits {
  readonly first: number;
  readonly end: number;
  readonly rows: number;
  /** Fewest steps and rows a view may show. */
  readonly minSteps?: number;
  readonly minRows?: number;
}

const clamp = (value: number, low: number, high: number): number => Math.min(high, Math.max(low, value));

/** An interval of at least `least`, at most the whole, moved back inside [low, high). */
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

/** Zoom about a point given as shares (0…1) of the view; a factor above 1 shows more. */
export function zoom(view: View, factorX: number, factorY: number, atX: number, atY: number, limits: Limits): View {
  const [width, height] = [view.to - view.from, view.bottom - view.top];
  const from = view.from + atX * width * (1 - factorX);
  const top = view.top + atY * height * (1 - factorY);
  return clampView({ from, to: from + width * factorX, top, bottom: top + height * factorY }, limits);
}

/** Move by shares of what is seen. */
export function pan(view: View, shareX: number, shareY: number, limits: Limits): View {
  const [dx, dy] = [shareX * (view.to - view.from), shareY * (view.bottom - view.top)];
  return clampView(
    { from: view.from + dx, to: view.to + dx, top: view.top + dy, bottom: view.bottom + dy },
    limits,
  );
}

/** While a run grows: a view that touched the end keeps touching it; any other view stays exactly where it was. */
export function follow(view: View, oldEnd: number, limits: Limits): View {
  if (view.to < oldEnd - 1e-9 || limits.end <= oldEnd) return view;
  // From the start to the end: show it all. A window at the end: move along with it.
  const from = view.from <= limits.first ? limits.first : view.from + limits.end - oldEnd;
  return clampView({ ...view, from, to: limits.end }, limits);
}

export const sameView = (a: View, b: View): boolean =>
  a.from === b.from && a.to === b.to && a.top === b.top && a.bottom === b.bottom;

/** Where steps [from, to) lie on a canvas of `width` that shows the view. */
export const toX = (step: number, view: View, width: number): number =>
  ((step - view.from) / (view.to - view.from)) * width;
export const toY = (row: number, view: View, height: number): number =>
  ((row - view.top) / (view.bottom - view.top)) * height;
export const stepAt = (x: number, view: View, width: number): number =>
  view.from + (x / width) * (view.to - view.from);
export const rowAt = (y: number, view: View, height: number): number =>
  view.top + (y / height) * (view.bottom - view.top);

/** The cell of a tile that holds a step: columns begin at `starts`, ascending. -1 before the first. */
export function columnOf(starts: ArrayLike<number>, step: number): number {
  let [low, high] = [0, starts.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle]! <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** What wins when codes share a cell: the largest, or (for ratios, where 128 is "equal") the one furthest from equal. */
export type Rank = Int16Array;
export const LARGEST: Rank = Int16Array.from({ length: 256 }, (_, code) => code);
export const FURTHEST: Rank = LARGEST.map((code) => {
  if (code === MISSING) return -1;
  return code === NOT_FINITE ? 999 : Math.abs(code - 128);
});

/**
 * One row of codes for each group of tile rows: the winner of each column. A NaN (255) always shows and a hole (0) never
 * hides a value. `groups` is a flat list: group g is members[starts[g] … starts[g + 1]).
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

/** Codes to pixels. */
export function paint(tile: Codes, colours: Uint32Array): ImageData {
  const image = new ImageData(Math.max(tile.columns, 1), Math.max(tile.rows, 1));
  const pixels = new Uint32Array(image.data.buffer);
  const { codes } = tile;
  const count = Math.min(codes.length, pixels.length);
  for (let at = 0; at < count; at++) pixels[at] = colours[codes[at]!]!;
  return image;
}

/** The value a code stands for; NaN for "missing" and "not finite". */
export function valueOf(code: number, scale: Scale): number {
  if (code === MISSING || code === NOT_FINITE) return Number.NaN;
  const share = (code - FIRST_CODE) / (LAST_CODE - FIRST_CODE);
  const value = scale.lo + share * (scale.hi - scale.lo);
  return scale.isLog ? 10 ** value : value;
}

/** Evenly spread marks of a legend; at round powers of ten where the scale spans at least one. */
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

/** Where on the scale (0…1) a value lies. */
export function shareOf(value: number, scale: Scale): number {
  const at = scale.isLog ? Math.log10(value) : value;
  return scale.hi !== scale.lo ? (at - scale.lo) / (scale.hi - scale.lo) : 0.5;
}

/** Round steps for an axis: 1, 2 or 5 times a power of ten, whole numbers only. */
export function stepTicks(from: number, to: number, most: number): number[] {
  const raw = Math.max((to - from) / Math.max(most, 1), 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const every = Math.max(1, Math.round([1, 2, 5, 10].find((factor) => factor * power >= raw)! * power));
  const ticks: number[] = [];
  for (let step = Math.ceil(from / every) * every; step < to; step += every) ticks.push(step);
  return ticks;
}
