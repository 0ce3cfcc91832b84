// Draws the tiles of a heatmap. Tiles are converted to bitmaps once and then only scaled. It does not use Svelte
// state: reading plain fields keeps the cost of a frame at a few milliseconds.

import { codeColour, css, FIRST_CODE, LAST_CODE, type MapName, NOT_FINITE, palette } from "../../lib/colour";
import { type Codes, columnOf, LARGEST, paint, pool, type Rank, type Scale, toX, toY, type View } from "../../lib/heat";
import { rowGroups, type Row } from "../../lib/tree";

export interface Tile {
  /** For each row of the tile, its position in the list of sites. */
  readonly sites: ArrayLike<number>;
  /** First step of each column, ascending. */
  readonly starts: ArrayLike<number>;
  /** One past the last step of the last column. */
  readonly end: number;
  readonly codes: Uint8Array;
  readonly scale: Scale;
}

interface Level {
  readonly codes: Codes;
  bitmap: ImageBitmap | HTMLCanvasElement | null;
}

/** Enough halvings for any screen height. */
const MAX_LEVELS = 8;

/** A palette that draws codes of one scale in the colours of another, so that all tiles match. */
export function rescaled(colours: Uint32Array, from: Scale, to: Scale): Uint32Array {
  if (from.lo === to.lo && from.hi === to.hi && from.isLog === to.isLog) return colours;
  const out = colours.slice();
  const last = LAST_CODE - FIRST_CODE;
  for (let code = FIRST_CODE; code <= LAST_CODE; code++) {
    const at = from.lo + ((code - FIRST_CODE) / last) * (from.hi - from.lo);
    const fraction = to.hi !== to.lo ? (at - to.lo) / (to.hi - to.lo) : 0.5;
    out[code] = colours[FIRST_CODE + Math.round(last * Math.min(1, Math.max(0, fraction)))]!;
  }
  return out;
}

function toBitmap(codes: Codes, colours: Uint32Array): ImageBitmap | HTMLCanvasElement {
  const image = paint(codes, colours);
  if (typeof OffscreenCanvas !== "undefined") {
    const canvas = new OffscreenCanvas(image.width, image.height);
    canvas.getContext("2d")!.putImageData(image, 0, 0);
    return canvas.transferToImageBitmap();
  }
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas;
}

function halved(codes: Codes, rank: Rank): Codes {
  const rows = Math.ceil(codes.rows / 2);
  const members = new Int32Array(codes.rows).map((_, row) => row);
  const starts = new Int32Array(rows + 1).map((_, row) => Math.min(2 * row, codes.rows));
  return pool(codes, members, starts, rank);
}

/** Minimum size of a rare cell in pixels. */
const MIN_PIXELS = 4;
/** With more cells than this, they are not treated as rare. */
const MAX_RARE = 200;

function rareCells(codes: Uint8Array, code: number): number[] {
  const found: number[] = [];
  for (let at = codes.indexOf(code); at >= 0 && found.length <= MAX_RARE; at = codes.indexOf(code, at + 1)) found.push(at);
  return found.length > MAX_RARE ? [] : found;
}

/** A tile as visible rows, with a pyramid of halved copies that keep the higher-ranked code of each pair. */
class Layer {
  private readonly levels: Level[];
  private readonly firstRow: number;
  readonly rows: number;
  private readonly rare = new Map<number, number[]>();

  constructor(
    readonly tile: Tile,
    shown: readonly Row[],
    numSites: number,
    readonly colours: Uint32Array,
    private readonly rank: Rank,
  ) {
    const tileRow = new Int32Array(numSites).fill(-1);
    for (let row = 0; row < tile.sites.length; row++) tileRow[tile.sites[row]!] = row;
    // A tile may contain only some of the rows; the tile underneath draws the others.
    let [first, end] = [0, shown.length];
    const isThere = (row: Row): boolean => row.node.sites.every((site) => tileRow[site]! >= 0);
    while (first < end && !isThere(shown[first]!)) first++;
    while (end > first && !isThere(shown[end - 1]!)) end--;
    const { members, starts } = rowGroups(shown.slice(first, end), tileRow);
    const columns = tile.starts.length;
    const codes = pool({ codes: tile.codes, rows: tile.sites.length, columns }, members, starts, rank);
    this.levels = [{ codes, bitmap: null }];
    this.firstRow = first;
    this.rows = end - first;
  }

  private level(number: number): Level {
    while (this.levels.length <= number) this.levels.push({ codes: halved(this.levels.at(-1)!.codes, this.rank), bitmap: null });
    const level = this.levels[number]!;
    level.bitmap ??= toBitmap(level.codes, this.colours);
    return level;
  }

  draw(context: CanvasRenderingContext2D, view: View, width: number, height: number): void {
    const { starts, end } = this.tile;
    if (starts.length === 0 || this.rows === 0) return;
    // Choose a level with at least one pixel per row, or a single NaN could fall between two pixels.
    let number = 0;
    while (number < MAX_LEVELS && (view.bottom - view.top) / 2 ** number > height) number++;
    const { bitmap, codes } = this.level(number);
    const tall = 2 ** number;
    const first = Math.max(0, Math.floor((view.top - this.firstRow) / tall));
    const last = Math.min(codes.rows, Math.ceil((view.bottom - this.firstRow) / tall));
    const firstColumn = Math.max(0, columnOf(starts, view.from));
    const lastColumn = Math.min(starts.length, columnOf(starts, view.to) + 1);
    if (last <= first || lastColumn <= firstColumn) return;
    const x = toX(starts[firstColumn]!, view, width);
    const right = toX(lastColumn < starts.length ? starts[lastColumn]! : end, view, width);
    const y = toY(this.firstRow + first * tall, view, height);
    const bottom = toY(Math.min(this.firstRow + last * tall, this.firstRow + this.rows), view, height);
    const rows = Math.min(last * tall, this.rows) / tall - first;
    context.drawImage(bitmap!, firstColumn, first, lastColumn - firstColumn, rows, x, y, right - x, bottom - y);
  }

  /** Enlarge rare cells that would be too small to notice, such as a single NaN. */
  drawRare(context: CanvasRenderingContext2D, view: View, width: number, height: number, code: number, colour: string): void {
    const { starts, end } = this.tile;
    const columns = starts.length;
    let rare = this.rare.get(code);
    if (!rare) this.rare.set(code, (rare = rareCells(this.levels[0]!.codes.codes, code)));
    for (const at of rare) {
      const column = at % columns;
      const row = this.firstRow + Math.floor(at / columns);
      const [x, right] = [toX(starts[column]!, view, width), toX(column + 1 < columns ? starts[column + 1]! : end, view, width)];
      const [y, bottom] = [toY(row, view, height), toY(row + 1, view, height)];
      if (right < 0 || x > width || bottom < 0 || y > height || (right - x >= MIN_PIXELS && bottom - y >= MIN_PIXELS)) continue;
      const [w, h] = [Math.max(right - x, MIN_PIXELS), Math.max(bottom - y, MIN_PIXELS)];
      context.fillStyle = "#fff";
      context.fillRect((x + right - w) / 2 - 1, (y + bottom - h) / 2 - 1, w + 2, h + 2);
      context.fillStyle = colour;
      context.fillRect((x + right - w) / 2, (y + bottom - h) / 2, w, h);
    }
  }

  codeAt(row: number, step: number): number | null {
    const column = columnOf(this.tile.starts, step);
    const at = row - this.firstRow;
    if (column < 0 || step >= this.tile.end || at < 0 || at >= this.rows) return null;
    return this.levels[0]!.codes.codes[at * this.tile.starts.length + column]!;
  }

  free(): void {
    for (const level of this.levels) if (level.bitmap && "close" in level.bitmap) level.bitmap.close();
  }
}

export interface HeatCell {
  readonly code: number;
  /** The steps [from, to) that share this cell. */
  readonly from: number;
  readonly to: number;
  readonly scale: Scale;
}

/** Two layers: the whole run, coarse, underneath, and the visible part, fine, on top. */
export class Scene {
  private whole: Tile | null = null;
  private detail: Tile | null = null;
  private layers: Layer[] = [];
  private rows: readonly Row[] = [];
  private numSites = 0;
  private colours = palette("viridis", false);
  private rareColours: [number, string][] = [];
  rank: Rank = LARGEST;
  scale: Scale = { lo: 0, hi: 1, isLog: true };

  setColours(map: MapName, isDark: boolean): void {
    this.colours = palette(map, isDark);
    this.rareColours = [LAST_CODE, NOT_FINITE].map((code) => [code, css(codeColour(code, map, isDark))]);
    this.rebuild();
  }

  setRows(rows: readonly Row[], numSites: number): void {
    this.rows = rows;
    this.numSites = numSites;
    this.rebuild();
  }

  /** Set the scale in which all tiles are drawn. */
  setScale(scale: Scale): void {
    if (scale.lo === this.scale.lo && scale.hi === this.scale.hi && scale.isLog === this.scale.isLog) return;
    this.scale = scale;
    this.rebuild();
  }

  setTiles(whole: Tile | null, detail: Tile | null): void {
    this.whole = whole;
    this.detail = detail;
    this.rebuild();
  }

  /** Set everything at once, for a static heatmap. */
  show(tile: Tile, rows: readonly Row[], numSites: number, map: MapName, isDark: boolean): void {
    [this.whole, this.detail, this.rows, this.numSites, this.scale] = [tile, null, rows, numSites, tile.scale];
    this.setColours(map, isDark);
  }

  private rebuild(): void {
    const old = this.layers;
    const tiles = [this.whole, this.detail].filter((tile) => tile !== null);
    this.layers = tiles.map((tile) => {
      const colours = rescaled(this.colours, tile.scale, this.scale);
      return new Layer(tile, this.rows, this.numSites, colours, this.rank);
    });
    for (const layer of old) layer.free();
  }

  draw(context: CanvasRenderingContext2D, view: View, width: number, height: number): void {
    context.imageSmoothingEnabled = false;
    for (const layer of this.layers) layer.draw(context, view, width, height);
    // Only on the finest tile: the coarse one has the same cells, but wider.
    const top = this.layers.at(-1);
    for (const [code, colour] of this.rareColours) top?.drawRare(context, view, width, height, code, colour);
  }

  /** The cell at a row and step, from the finest tile that contains it. */
  at(row: number, step: number): HeatCell | null {
    for (let index = this.layers.length - 1; index >= 0; index--) {
      const layer = this.layers[index]!;
      const code = layer.codeAt(row, step);
      if (code === null) continue;
      const { starts, end, scale } = layer.tile;
      const column = columnOf(starts, step);
      return { code, from: starts[column]!, to: column + 1 < starts.length ? starts[column + 1]! : end, scale };
    }
    return null;
  }

  /** The columns of the finest tile within a range of steps. */
  columns(from: number, to: number): { from: number; to: number }[] {
    const tile = this.detail ?? this.whole;
    if (!tile) return [];
    const found: { from: number; to: number }[] = [];
    for (let column = Math.max(0, columnOf(tile.starts, from)); column < tile.starts.length; column++) {
      const start = tile.starts[column]!;
      if (start >= to) break;
      found.push({ from: start, to: column + 1 < tile.starts.length ? tile.starts[column + 1]! : tile.end });
    }
    return found;
  }

  free(): void {
    for (const layer of this.layers) layer.free();
    this.layers = [];
  }
}
