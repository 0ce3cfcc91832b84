// A finding's place in a heatmap, before folding decides which row it falls on.

import type { Mark } from "./overlay";

export interface SiteMark extends Omit<Mark, "row"> {
  /** Position of the row's site in the whole list. */
  readonly site: number;
}
