// Where the loss is going, in a few words: what Training Lens showed as convergence, from the curve on the page.

import type { Lines } from "./api";
import { integer, number, percent } from "./format";

export interface Convergence {
  word: "falling" | "flat" | "rising" | "not finite" | "too short";
  sentence: string;
}

const SHORTEST = 20;
/** Less than this from tenth to tenth is flat. */
const FLAT = 0.005;

export function convergence(lines: Lines, name: string): Convergence {
  const series = lines.series[0];
  if (!series) return { word: "too short", sentence: "" };
  const points = Array.from(lines.steps, (step, n) => ({ step, value: series.values[n] as number })).filter(({ value }) => Number.isFinite(value));
  const broken = series.nonfinite[0];
  const best = points.reduce((low, point) => (point.value < low.value ? point : low), points[0] ?? { step: 0, value: NaN });
  const bestText = points.length ? `Best ${number(best.value)} at step ${integer(best.step)}.` : "";
  if (broken !== undefined && (points.at(-1)?.step ?? -1) <= lines.to && broken >= (points.at(-1)?.step ?? -1) - 1) {
    return { word: "not finite", sentence: `${name} is not finite since step ${integer(broken)}. ${bestText}` };
  }
  if (points.length < SHORTEST) return { word: "too short", sentence: bestText };
  const tenth = Math.max(Math.floor(points.length / 10), 2);
  const late = median(points.slice(-tenth).map(({ value }) => value));
  const before = median(points.slice(-2 * tenth, -tenth).map(({ value }) => value));
  const change = (late - before) / Math.max(Math.abs(before), 1e-12);
  const word = Math.abs(change) < FLAT ? "flat" : change < 0 ? "falling" : "rising";
  const how = word === "flat" ? "is flat over the last tenth" : `is ${word} (${change > 0 ? "+" : ""}${percent(change)} over the last tenth)`;
  return { word, sentence: `${name} ${how}. ${bestText}` };
}

function median(values: number[]): number {
  const ordered = [...values].sort((a, b) => a - b);
  return ordered[Math.floor(ordered.length / 2)] ?? NaN;
}
