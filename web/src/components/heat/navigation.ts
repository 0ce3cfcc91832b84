// Mouse and keyboard navigation of a heatmap, as pure functions: from pixels and keys to cells and views.

import { type Limits, pan, rowAt, stepAt, type View, zoom } from "../../lib/heat";
import type { Area, Cursor } from "./overlay";

export interface Size {
  readonly width: number;
  readonly height: number;
}

const clamp = (value: number, low: number, high: number): number => Math.min(Math.max(value, low), Math.max(high, low));

/** The cell, clamped to the heatmap. */
export const inRange = ({ row, step }: Cursor, limits: Limits): Cursor => ({
  row: clamp(row, 0, limits.rows - 1),
  step: clamp(step, limits.first, limits.end - 1),
});

/** The cell at a pixel position. */
export function cellAt(x: number, y: number, view: View, size: Size, limits: Limits): Cursor {
  const [step, row] = [Math.floor(stepAt(x, view, size.width)), Math.floor(rowAt(y, view, size.height))];
  return inRange({ step, row }, limits);
}

/** The area between two cells, inclusive. */
export const between = (a: Cursor, b: Cursor): Area => ({
  from: Math.min(a.step, b.step),
  to: Math.max(a.step, b.step) + 1,
  top: Math.min(a.row, b.row),
  bottom: Math.max(a.row, b.row) + 1,
});

/** The view, panned by the minimum that makes the cell visible. */
export function broughtIntoView(cell: Cursor, view: View): View {
  const [wide, tall] = [view.to - view.from, view.bottom - view.top];
  const from = cell.step < view.from ? cell.step : cell.step + 1 > view.to ? cell.step + 1 - wide : view.from;
  const top = cell.row < view.top ? cell.row : cell.row + 1 > view.bottom ? cell.row + 1 - tall : view.top;
  return { from, to: from + wide, top, bottom: top + tall };
}

/** The view after a wheel event: zooms steps (rows with Alt or Ctrl) around the pointer; pans sideways or with Shift. */
export function wheeled(event: Pick<WheelEvent, "deltaX" | "deltaY" | "shiftKey" | "altKey" | "ctrlKey">, at: [number, number], view: View, size: Size, limits: Limits): View {
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return pan(view, event.deltaX / size.width, 0, limits);
  if (event.shiftKey) return pan(view, event.deltaY / size.width, 0, limits);
  const factor = 2 ** (clamp(event.deltaY, -200, 200) / 250);
  const [x, y] = [at[0] / size.width, at[1] / size.height];
  return event.altKey || event.ctrlKey ? zoom(view, 1, factor, x, y, limits) : zoom(view, factor, 1, x, y, limits);
}

/** The cell a key moves to: by rows, or by columns of the heatmap, each of which may cover several steps. */
export function walked(key: string, cell: Cursor, column: { from: number; to: number } | null, view: View, limits: Limits): Cursor | null {
  const page = Math.max(1, Math.floor((view.bottom - view.top) / 2));
  const moves: Record<string, [number, number]> = {
    ArrowDown: [1, 0], ArrowUp: [-1, 0], PageDown: [page, 0], PageUp: [-page, 0],
    ArrowRight: [0, column ? column.to - cell.step : 1], ArrowLeft: [0, column ? column.from - 1 - cell.step : -1],
    Home: [0, -Infinity], End: [0, Infinity],
  };
  const move = moves[key];
  return move ? inRange({ row: cell.row + move[0], step: cell.step + move[1] }, limits) : null;
}
