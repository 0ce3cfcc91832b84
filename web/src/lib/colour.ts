// Colour maps, computed in OKLab so that equal differences in value look equal, also to colour-blind readers.
// Lightness increases along a sequential map, so that it stays readable in greyscale and in print.

export type Rgb = readonly [number, number, number];
export type MapName = "viridis" | "cividis" | "diverging";
export const SEQUENTIAL: readonly MapName[] = ["viridis", "cividis"];

/** Codes of a tile: 0 is missing, 1…254 are values, 255 is NaN or Inf. */
export const MISSING = 0;
export const NOT_FINITE = 255;
export const FIRST_CODE = 1;
export const LAST_CODE = 254;

interface Stop {
  readonly at: number;
  readonly lightness: number;
  readonly chroma: number;
  readonly hue: number;
}

const VIRIDIS: readonly Stop[] = [
  { at: 0, lightness: 0.27, chroma: 0.11, hue: 312 },
  { at: 0.25, lightness: 0.43, chroma: 0.11, hue: 264 },
  { at: 0.5, lightness: 0.59, chroma: 0.1, hue: 205 },
  { at: 0.75, lightness: 0.76, chroma: 0.16, hue: 152 },
  { at: 1, lightness: 0.93, chroma: 0.18, hue: 106 },
];

const CIVIDIS_ENDS: readonly [Rgb, Rgb] = [
  [0.26, 0.0, -0.1],
  [0.92, -0.01, 0.16],
];

/** Blue for less, orange for more: distinguishable with every form of colour blindness. */
const LESS = { chroma: 0.14, hue: 252 };
const MORE = { chroma: 0.15, hue: 58 };

const toLinear = (c: number): number => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const toGamma = (c: number): number => (c <= 0.0031308 ? c * 12.92 : 1.055 * c ** (1 / 2.4) - 0.055);

function labToLinear([L, a, b]: Rgb): Rgb {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

/** OKLab of an sRGB colour in 0…255; used to measure how different two colours look. */
export function toLab([red, green, blue]: Rgb): Rgb {
  const [r, g, b] = [toLinear(red / 255), toLinear(green / 255), toLinear(blue / 255)];
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

const isShowable = (rgb: Rgb): boolean => rgb.every((c) => c >= -1e-4 && c <= 1.0001);

/** sRGB of an OKLab colour. Colours outside the gamut lose chroma, never lightness. */
export function labToRgb([L, a, b]: Rgb): Rgb {
  let [low, high] = [0, 1];
  if (isShowable(labToLinear([L, a, b]))) low = 1;
  for (let i = 0; low < 1 && i < 14; i++) {
    const mid = (low + high) / 2;
    if (isShowable(labToLinear([L, a * mid, b * mid]))) low = mid;
    else high = mid;
  }
  const byte = (c: number): number => Math.round(255 * toGamma(Math.min(1, Math.max(0, c))));
  const [red, green, blue] = labToLinear([L, a * low, b * low]);
  return [byte(red), byte(green), byte(blue)];
}

const mix = (from: number, to: number, fraction: number): number => from + (to - from) * fraction;

function polar(lightness: number, chroma: number, hue: number): Rgb {
  const angle = (hue * Math.PI) / 180;
  return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)];
}

function viridis(t: number): Rgb {
  const last = VIRIDIS.length - 1;
  const at = Math.min(Math.floor(t * last), last - 1);
  const [from, to] = [VIRIDIS[at]!, VIRIDIS[at + 1]!];
  const fraction = (t - from.at) / (to.at - from.at);
  // Lightness is linear over the whole map; only hue and chroma change slope at the stops.
  const lightness = mix(VIRIDIS[0]!.lightness, VIRIDIS[last]!.lightness, t);
  return polar(lightness, mix(from.chroma, to.chroma, fraction), mix(from.hue, to.hue, fraction));
}

function cividis(t: number): Rgb {
  const [from, to] = CIVIDIS_ENDS;
  return [mix(from[0], to[0], t), mix(from[1], to[1], t), mix(from[2], to[2], t)];
}

function diverging(t: number, isDark: boolean): Rgb {
  const side = t < 0.5 ? LESS : MORE;
  const distance = Math.abs(2 * t - 1);
  const lightness = isDark ? mix(0.27, 0.8, distance) : mix(0.97, 0.42, distance);
  return polar(lightness, side.chroma * distance, side.hue);
}

/** The colour at a position between 0 and 1. */
export function colourAt(name: MapName, t: number, isDark = false): Rgb {
  const fraction = Math.min(1, Math.max(0, t));
  if (name === "diverging") return labToRgb(diverging(fraction, isDark));
  return labToRgb(name === "cividis" ? cividis(fraction) : viridis(fraction));
}

/** The colour of NaN and Inf: a bright colour outside the map, distinct with every form of colour blindness (tested). */
export function notFiniteColour(name: MapName, isDark: boolean): Rgb {
  if (name === "viridis") return [212, 16, 24];
  if (name === "cividis") return [255, 0, 255];
  return isDark ? [255, 255, 40] : [20, 240, 20];
}

/** The colour of missing values: close to the background, or grey in the diverging map, whose middle is the background. */
export function missingColour(name: MapName, isDark: boolean): Rgb {
  if (name === "diverging") return isDark ? [176, 176, 176] : [104, 104, 104];
  return isDark ? [15, 15, 15] : [251, 251, 251];
}

/** 256 colours in canvas format (RGBA bytes), one for each code of a tile. */
export function palette(name: MapName, isDark: boolean): Uint32Array {
  const bytes = new Uint8ClampedArray(256 * 4);
  for (let code = 0; code < 256; code++) bytes.set([...codeColour(code, name, isDark), 255], 4 * code);
  return new Uint32Array(bytes.buffer);
}

export function codeColour(code: number, name: MapName, isDark: boolean): Rgb {
  if (code === MISSING) return missingColour(name, isDark);
  if (code === NOT_FINITE) return notFiniteColour(name, isDark);
  return colourAt(name, (code - FIRST_CODE) / (LAST_CODE - FIRST_CODE), isDark);
}

export const css = ([red, green, blue]: Rgb): string => `rgb(${red},${green},${blue})`;
