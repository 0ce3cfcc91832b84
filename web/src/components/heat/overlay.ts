// Draws the overlay of a heatmap: step axis, crosshair, selection and findings. Stateless.

import { stepTicks, toX, toY, type View } from "../../lib/heat";
import { integer } from "../../lib/format";
import type { Colours } from "../../lib/theme.svelte";

export interface Mark {
  /** Index among the visible rows. */
  readonly row: number;
  readonly step: number;
  readonly last: number;
  readonly severity: "critical" | "warning" | "info";
  readonly label: string;
  readonly href: string;
}

export interface Area {
  readonly from: number;
  readonly to: number;
  readonly top: number;
  readonly bottom: number;
}

export interface Cursor {
  readonly row: number;
  readonly step: number;
}

export const AXIS_HEIGHT = 20;
const FONT = "11px ui-sans-serif, system-ui, sans-serif";

export function drawAxis(context: CanvasRenderingContext2D, view: View, width: number, height: number, colours: Colours): void {
  context.font = FONT;
  context.textBaseline = "top";
  const y = height + 5;
  let free = -Infinity;
  for (const step of stepTicks(view.from, view.to, width / 90)) {
    // Centre the tick on a wide cell; put it at the edge of a thin one.
    const cell = width / (view.to - view.from);
    const x = toX(step, view, width) + (cell > 12 ? cell / 2 : 0);
    const text = integer(step);
    const size = context.measureText(text).width;
    const left = Math.min(Math.max(x - size / 2, 0), width - size);
    if (left < free) continue;
    free = left + size + 12;
    context.fillStyle = colours.line;
    context.fillRect(Math.round(x), height, 1, 4);
    context.fillStyle = colours.muted;
    context.fillText(text, left, y);
  }
}

/** A white line with a dark outline, visible on every colour. */
function doubleRect(context: CanvasRenderingContext2D, x: number, y: number, w: number, h: number): void {
  context.lineWidth = 3;
  context.strokeStyle = "rgba(0,0,0,0.75)";
  context.strokeRect(x, y, w, h);
  context.lineWidth = 1;
  context.strokeStyle = "#fff";
  context.strokeRect(x, y, w, h);
}

export function drawCursor(context: CanvasRenderingContext2D, cursor: Cursor, view: View, width: number, height: number): void {
  const [x, y] = [toX(cursor.step, view, width), toY(cursor.row, view, height)];
  const w = Math.max(toX(cursor.step + 1, view, width) - x, 3);
  const h = Math.max(toY(cursor.row + 1, view, height) - y, 3);
  context.fillStyle = "rgba(128,128,128,0.45)";
  context.fillRect(Math.round(x + w / 2), 0, 1, height);
  context.fillRect(0, Math.round(y + h / 2), width, 1);
  doubleRect(context, Math.round(x) + 0.5, Math.round(y) + 0.5, Math.round(w), Math.round(h));
}

export function drawArea(context: CanvasRenderingContext2D, area: Area, view: View, width: number, height: number): void {
  const [x, y] = [toX(area.from, view, width), toY(area.top, view, height)];
  const [w, h] = [toX(area.to, view, width) - x, toY(area.bottom, view, height) - y];
  context.fillStyle = "rgba(255,255,255,0.18)";
  context.fillRect(x, y, w, h);
  context.setLineDash([5, 3]);
  doubleRect(context, Math.round(x) + 0.5, Math.round(y) + 0.5, Math.round(w), Math.round(h));
  context.setLineDash([]);
}

/** Draws each finding as a triangle that points at its first step without covering the cell. */
export function drawMarks(
  context: CanvasRenderingContext2D, marks: readonly Mark[], view: View, width: number, height: number, colours: Colours,
): void {
  for (const mark of marks) {
    const [x, y] = markAt(mark, view, width, height);
    if (x < -8 || x > width + 8 || y < -8 || y > height + 8) continue;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - 9, y - 5);
    context.lineTo(x - 9, y + 5);
    context.closePath();
    context.lineWidth = 3;
    context.strokeStyle = colours.surface;
    context.stroke();
    context.fillStyle = colours[mark.severity];
    context.fill();
  }
}

/** The tip of a mark, kept away from the edges so that it stays visible. */
export function markAt(mark: Mark, view: View, width: number, height: number): [number, number] {
  const x = toX(mark.step, view, width);
  const y = toY(mark.row + 0.5, view, height);
  const isInside = mark.row + 1 > view.top && mark.row < view.bottom;
  return [x >= 0 && x < 10 ? 10 : x, isInside ? Math.min(Math.max(y, 6), height - 6) : y];
}

export function nearestMark(
  marks: readonly Mark[], x: number, y: number, view: View, width: number, height: number,
): Mark | null {
  let [found, best]: [Mark | null, number] = [null, 9];
  for (const mark of marks) {
    const [mx, my] = markAt(mark, view, width, height);
    const distance = Math.hypot(mx - 4 - x, my - y);
    if (distance < best) [found, best] = [mark, distance];
  }
  return found;
}
