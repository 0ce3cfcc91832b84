// Loads the tiles of a heatmap: the whole run, coarse, and the visible part at screen resolution. The old tile stays until
// the new one arrives; outdated requests are aborted.

import type { Heat } from "../../lib/api";
import type { View } from "../../lib/heat";
import type { Tile } from "./scene";

export interface TileQuery {
  readonly w: number;
  /** First and last step, inclusive; omitted for all. */
  readonly from?: number;
  readonly to?: number;
  /** Positions of rows, "0-499"; omitted for all. */
  readonly rows?: string;
}

export type Load = (query: TileQuery, signal: AbortSignal) => Promise<Heat>;

/** A server response as a tile, with its rows mapped to positions in the list of names. */
export function asTile(heat: Heat, positionOf: (row: number, heat: Heat) => number): Tile {
  const sites = Int32Array.from({ length: heat.num_rows }, (_, row) => positionOf(row, heat));
  const starts = Float64Array.from({ length: heat.num_columns }, (_, column) => heat.first + column * heat.steps_per_column);
  return {
    sites,
    starts,
    end: heat.first + heat.num_columns * heat.steps_per_column,
    codes: heat.codes,
    scale: { lo: heat.lo, hi: heat.hi, isLog: heat.scale === "log10" },
  };
}

const DEBOUNCE_MS = 90;
/** Fraction of the view to fetch beyond each edge, so that a short pan needs no request. */
const MARGIN = 0.25;
const MAX_COLUMNS = 4096;
/** Up to this number of cells, all rows are requested at once, so that scrolling needs no request. */
const MANY_CELLS = 600_000;

export interface TileRequest {
  readonly view: View;
  readonly width: number;
  /** First and last position of the visible rows, inclusive; null for all. */
  readonly rows: readonly [number, number] | null;
  readonly numRows: number;
}

export class Tiles {
  whole: Heat | null = null;
  detail: Heat | null = null;
  private detailRows: readonly [number, number] | null = null;
  private pending: AbortController | null = null;
  private pendingWhole: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private retry: ReturnType<typeof setTimeout> | undefined;
  private isClosed = false;

  constructor(
    private readonly load: Load,
    private readonly onchange: () => void,
    private readonly onerror: (error: unknown) => void,
  ) {}

  /** Load or reload the whole run; the old tile stays until the response arrives. */
  async refresh(width: number): Promise<void> {
    this.pendingWhole?.abort();
    const controller = (this.pendingWhole = new AbortController());
    const heat = await this.fetch({ w: Math.min(Math.ceil(width), MAX_COLUMNS) }, controller);
    if (!heat) return;
    this.whole = heat;
    this.onchange();
    if (!heat.is_exact) this.later(() => void this.refresh(width), heat.retry_ms);
  }

  /** Set the visible range; fetches a finer tile if the whole-run tile is too coarse for it. */
  request(request: TileRequest): void {
    clearTimeout(this.timer);
    if (!this.whole || this.isGoodEnough(request)) return;
    this.timer = setTimeout(() => void this.fetchDetail(request), DEBOUNCE_MS);
  }

  private isGoodEnough({ view, width, rows }: TileRequest): boolean {
    const perPixel = Math.max((view.to - view.from) / width, 1);
    const { whole, detail } = this;
    if (whole!.steps_per_column <= Math.max(1, perPixel * 1.3)) {
      if (detail) {
        this.detail = null;
        this.onchange();
      }
      return true;
    }
    if (!detail || detail.steps_per_column > Math.max(1, perPixel * 1.3)) return false;
    const [from, to] = [Math.max(view.from, whole!.first), Math.min(view.to, whole!.last_step + 1)];
    const covers = detail.first <= from && detail.first + detail.num_columns * detail.steps_per_column >= to;
    const hasRows = !this.detailRows || (rows !== null && this.detailRows[0] <= rows[0] && this.detailRows[1] >= rows[1]);
    return covers && hasRows;
  }

  private async fetchDetail({ view, width, rows, numRows }: TileRequest): Promise<void> {
    this.pending?.abort();
    const controller = (this.pending = new AbortController());
    const margin = (view.to - view.from) * MARGIN;
    const from = Math.max(0, Math.floor(view.from - margin));
    const to = Math.ceil(view.to + margin);
    const w = Math.min(Math.ceil(width * (1 + 2 * MARGIN)), MAX_COLUMNS);
    const some = rows && numRows * w > MANY_CELLS ? widened(rows, numRows) : null;
    const query = { w, from, to, ...(some ? { rows: `${some[0]}-${some[1]}` } : {}) };
    const heat = await this.fetch(query, controller);
    if (!heat) return;
    this.detail = heat;
    this.detailRows = some;
    this.onchange();
    if (!heat.is_exact) this.later(() => void this.fetchDetail({ view, width, rows, numRows }), heat.retry_ms);
  }

  private async fetch(query: TileQuery, controller: AbortController): Promise<Heat | null> {
    try {
      const heat = await this.load(query, controller.signal);
      return this.isClosed || controller.signal.aborted ? null : heat;
    } catch (error) {
      if (!this.isClosed && !controller.signal.aborted) this.onerror(error);
      return null;
    }
  }

  private later(act: () => void, wait_ms: number): void {
    clearTimeout(this.retry);
    this.retry = setTimeout(() => !this.isClosed && act(), Math.max(wait_ms, 100));
  }

  close(): void {
    this.isClosed = true;
    clearTimeout(this.timer);
    clearTimeout(this.retry);
    this.pending?.abort();
    this.pendingWhole?.abort();
  }
}

/** The range of rows, extended by its own length above and below. */
function widened([first, last]: readonly [number, number], numRows: number): [number, number] {
  const more = last - first + 1;
  return [Math.max(0, first - more), Math.min(numRows - 1, last + more)];
}
