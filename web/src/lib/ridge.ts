// Ridgeline plots: histograms over time as overlapping ridges, oldest at the back. Geometry only, no canvas.

export interface Histograms {
  /** counts[column * bins + bin]; bin b counts magnitudes from 2**(b + lowest). */
  readonly counts: ArrayLike<number>;
  readonly bins: number;
  readonly columns: number;
}

export interface Ridge {
  readonly column: number;
  /** Baseline of the ridge, in pixels from the top. */
  readonly base: number;
  /** One height per bin, in pixels above the baseline. */
  readonly heights: Float64Array;
}

/** Each bin as a fraction of its column. */
export function fractions(histograms: Histograms): Float64Array {
  const { counts, bins, columns } = histograms;
  const out = new Float64Array(bins * columns);
  for (let column = 0; column < columns; column++) {
    let total = 0;
    for (let bin = 0; bin < bins; bin++) total += counts[column * bins + bin]!;
    if (total > 0) for (let bin = 0; bin < bins; bin++) out[column * bins + bin] = counts[column * bins + bin]! / total;
  }
  return out;
}

/** First and last non-empty bin, with a margin of one bin on each side. */
export function usedBins(histograms: Histograms): [number, number] {
  const { counts, bins, columns } = histograms;
  let [first, last] = [bins, -1];
  for (let column = 0; column < columns; column++)
    for (let bin = 0; bin < bins; bin++)
      if (counts[column * bins + bin]! > 0) {
        if (bin < first) first = bin;
        if (bin > last) last = bin;
      }
  if (last < 0) return [0, bins - 1];
  return [Math.max(0, first - 1), Math.min(bins - 1, last + 1)];
}

/** At most `most` evenly spaced non-empty columns, including the first and the last. */
export function chosenColumns(histograms: Histograms, most: number): number[] {
  const { counts, bins, columns } = histograms;
  const filled: number[] = [];
  for (let column = 0; column < columns; column++)
    for (let bin = 0; bin < bins; bin++)
      if (counts[column * bins + bin]! > 0) {
        filled.push(column);
        break;
      }
  if (filled.length <= most) return filled;
  return Array.from({ length: most }, (_, at) => filled[Math.round((at * (filled.length - 1)) / (most - 1))]!);
}

/** Ridges from back (first column, at the top) to front. A peak overlaps about `overlap` rows. */
export function ridges(histograms: Histograms, columns: readonly number[], height: number, overlap = 3): Ridge[] {
  const { bins } = histograms;
  const spread = fractions(histograms);
  let peak = 0;
  for (const column of columns) for (let bin = 0; bin < bins; bin++) peak = Math.max(peak, spread[column * bins + bin]!);
  const gap = height / (columns.length + overlap);
  return columns.map((column, at) => {
    const heights = new Float64Array(bins);
    for (let bin = 0; bin < bins; bin++) heights[bin] = peak > 0 ? (spread[column * bins + bin]! / peak) * gap * overlap : 0;
    return { column, base: gap * (overlap + at + 0.75), heights };
  });
}
