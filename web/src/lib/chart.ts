// Line chart helpers that uPlot lacks: tick labels for small numbers, non-finite values, series with different steps.
// No DOM access.

import uPlot from "uplot";
import type { Lines, LineSeries } from "./api";
import { number } from "./format";

export interface Line {
  label: string;
  /** Steps (or times in s), ascending. */
  x: ArrayLike<number>;
  /** NaN where the line has no point. */
  y: ArrayLike<number>;
  /** Steps at which the value is NaN or infinite, drawn as a gap with a cross above it. */
  nonfinite?: ArrayLike<number>;
  /** Index in the palette; by default the index of the line. */
  colour?: number;
  dashed?: boolean;
}

export interface Mark {
  step: number;
  /** Last step; a band is drawn from `step` to it. */
  last?: number | null;
  severity: "critical" | "warning" | "info";
  label: string;
  href?: string | undefined;
}

/** The bands of marks. Overlapping ones are merged, because stacked tints would hide the data. */
export function bands(marks: readonly Mark[]): { from: number; to: number; severity: Mark["severity"] }[] {
  const found: { from: number; to: number; severity: Mark["severity"] }[] = [];
  for (const severity of ["critical", "warning", "info"] as const) {
    const own = marks.filter((mark) => mark.severity === severity && (mark.last ?? mark.step) > mark.step).sort((a, b) => a.step - b.step);
    for (const { step, last } of own) {
      const to = last ?? step;
      const before = found.findLast((band) => band.severity === severity);
      if (before && step <= before.to) before.to = Math.max(before.to, to);
      else found.push({ from: step, to, severity });
    }
  }
  return found;
}

/** The series of a response as chart lines. */
export function asLines({ steps, series }: Lines, label: (one: LineSeries) => string = (one) => one.name): Line[] {
  return series.map((one) => ({ label: label(one), x: steps, y: one.values, nonfinite: one.nonfinite }));
}

/** All lines on a common step axis. null is a gap; undefined is a step without a point, which the line passes over. */
export function align(lines: readonly Line[], log: boolean): uPlot.AlignedData {
  const tables = lines.map((line) => {
    const broken = new Set(Array.from(line.nonfinite ?? []));
    const y = Array.from(line.y, (value, n) => {
      if (Number.isFinite(value) && !(log && value <= 0)) return value;
      return Number.isNaN(value) && !broken.has(line.x[n] as number) ? undefined : null;
    });
    return [Array.from(line.x), y] as uPlot.AlignedData;
  });
  if (tables.length === 0) return [[]];
  return sameSteps(lines) ? merged(tables) : uPlot.join(tables);
}

function sameSteps(lines: readonly Line[]): boolean {
  const first = lines[0]?.x;
  if (!first) return true;
  return lines.every(({ x }) => {
    if (x === first) return true;
    if (x.length !== first.length) return false;
    for (let i = 0; i < x.length; i++) if (x[i] !== first[i]) return false;
    return true;
  });
}

function merged(tables: uPlot.AlignedData[]): uPlot.AlignedData {
  const columns = tables.flatMap((table) => table.slice(1));
  return [tables[0]![0], ...columns] as uPlot.AlignedData;
}

/** Ticks of a log axis: 1, 2, 5 within up to two decades, otherwise whole decades, about `most` of them. */
export function logTicks(lo: number, hi: number, most = 6): number[] {
  if (!(lo > 0) || !(hi > lo)) return [];
  const from = Math.floor(Math.log10(lo));
  const upTo = Math.ceil(Math.log10(hi));
  const decades = upTo - from;
  const every = Math.max(1, Math.ceil(decades / most));
  const within = decades <= 2 ? [1, 2, 5] : [1];
  const ticks: number[] = [];
  for (let power = from; power <= upTo; power++) {
    if (((power % every) + every) % every !== 0) continue;
    for (const factor of within) {
      const tick = Number(`${factor}e${power}`);
      if (tick >= lo && tick <= hi) ticks.push(tick);
    }
  }
  // Within a decade a log axis is nearly linear, so evenly spaced ticks are more useful than a single one.
  return ticks.length >= 3 || decades > 2 ? ticks : evenTicks(lo, hi, 4);
}

function evenTicks(lo: number, hi: number, most: number): number[] {
  const rough = (hi - lo) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) ?? rough;
  const first = Math.ceil(lo / step);
  return Array.from({ length: Math.floor(hi / step) - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

/** Whether two sets of lines look the same; the user is then not notified of new data. */
export function sameLines(a: readonly Line[], b: readonly Line[]): boolean {
  const same = (p: ArrayLike<number>, q: ArrayLike<number>): boolean => {
    if (p.length !== q.length) return false;
    for (let n = 0; n < p.length; n++) if (!Object.is(p[n], q[n])) return false;
    return true;
  };
  return a.length === b.length && a.every((line, n) => {
    const other = b[n]!;
    return line.label === other.label && same(line.x, other.x) && same(line.y, other.y) && same(line.nonfinite ?? [], other.nonfinite ?? []);
  });
}

/** Limit for axis ends, so that their difference stays finite. */
const LARGEST = 8e307;

/** Range of the value axis, with padding; non-empty for constant lines too. */
export function yRange(lo: number | null, hi: number | null, log: boolean): [number, number] {
  if (lo === null || hi === null || !Number.isFinite(lo) || !Number.isFinite(hi)) return log ? [0.1, 1] : [0, 1];
  if (!log && !Number.isFinite((hi - lo) * 2)) return [Math.max(lo, -LARGEST), Math.min(hi, LARGEST)];
  if (log) {
    const safe = Math.max(lo, 1e-300);
    return safe === hi ? [safe / 3, hi * 3] : [safe / 1.3, hi * 1.3];
  }
  if (lo === hi) return lo === 0 ? [-1, 1] : [lo - Math.abs(lo) * 0.1, hi + Math.abs(hi) * 0.1];
  const room = (hi - lo) * 0.06;
  return [lo >= 0 && lo - room < 0 ? 0 : lo - room, hi + room];
}

export const tickLabels = (ticks: readonly (number | null)[]): string[] => {
  const present = ticks.filter((tick): tick is number => tick !== null);
  const gap = present.length > 1 ? Math.abs(present[1]! - present[0]!) : 0;
  const largest = Math.max(0, ...present.map(Math.abs));
  return ticks.map((tick) => (tick === null ? "" : tickLabel(tick, gap, largest)));
};

/** Enough digits to distinguish neighbouring ticks, in the same notation for all ticks of an axis. */
function tickLabel(tick: number, gap: number, largest: number): string {
  if (tick === 0) return "0";
  const decimals = [0, 1, 2, 3, 4, 5, 6].find((n) => isWhole(gap * 10 ** n)) ?? 7;
  if (gap > 0 && isWhole(tick / gap) && largest >= 1e-4 && largest < 1e5 && decimals <= 6) return tick.toFixed(decimals).replace("-", "−");
  const figures = gap > 0 ? Math.ceil(Math.log10(Math.abs(tick) / gap)) + 2 : 3;
  return number(Number(tick.toPrecision(12)), Math.min(Math.max(figures, 2), 8));
}

const isWhole = (value: number): boolean => Math.abs(value - Math.round(value)) < 1e-6;

export const stepLabels = (ticks: readonly (number | null)[]): string[] =>
  ticks.map((tick) => {
    if (tick === null || !Number.isInteger(tick)) return "";
    if (Math.abs(tick) >= 1e6) return `${Number((tick / 1e6).toFixed(3))} M`;
    if (Math.abs(tick) >= 1e4) return `${Number((tick / 1e3).toFixed(3))} k`;
    return String(tick);
  });

/** Whether a log axis is more readable: all values positive, over more than two decades. */
export function wantsLog(lines: readonly Line[]): boolean {
  let lo = Infinity;
  let hi = -Infinity;
  for (const { y } of lines) {
    for (let i = 0; i < y.length; i++) {
      const value = y[i] as number;
      if (!Number.isFinite(value)) continue;
      if (value < lo) lo = value;
      if (value > hi) hi = value;
    }
  }
  return lo > 0 && hi / lo > 100;
}
