// The position of a finding in a heatmap, before folding determines its row.

import type { Mark } from "./overlay";

export interface SiteMark extends Omit<Mark, "row"> {
  /** Position of the site in the full list of rows. */
  readonly site: number;
}
