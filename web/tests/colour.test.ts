import assert from "node:assert/strict";
import { test } from "node:test";
import { colourAt, type MapName, missingColour, notFiniteColour, palette, type Rgb, toLab } from "../src/lib/colour";

// Simulation of protanopia, deuteranopia and tritanopia in linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
const EYES: Record<string, number[][]> = {
  normal: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protan: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deutan: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritan: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};
const linear = (c: number): number => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const gamma = (c: number): number => (c <= 0.0031308 ? c * 12.92 : 1.055 * c ** (1 / 2.4) - 0.055);

function seen(eye: number[][], colour: Rgb): Rgb {
  const light = colour.map((c) => linear(c / 255));
  const mixed = eye.map((row) => row.reduce((sum, weight, at) => sum + weight * light[at]!, 0));
  return mixed.map((c) => 255 * gamma(Math.min(1, Math.max(0, c)))) as unknown as Rgb;
}

function apart(a: Rgb, b: Rgb): number {
  const [x, y] = [toLab(a), toLab(b)];
  return Math.hypot(x[0] - y[0], x[1] - y[1], x[2] - y[2]);
}

const MAPS: [MapName, boolean][] = [["viridis", false], ["viridis", true], ["cividis", false], ["cividis", true],
  ["diverging", false], ["diverging", true]];
const POSITIONS = Array.from({ length: 254 }, (_, i) => i / 253);

for (const [name, isDark] of MAPS) {
  const colours = POSITIONS.map((position) => colourAt(name, position, isDark));
  for (const [eye, matrix] of Object.entries(EYES)) {
    test(`${name} ${isDark ? "dark" : "light"}: NaN and missing are distinct for ${eye} eyes`, () => {
      const nearest = (odd: Rgb): number =>
        Math.min(...colours.map((colour) => apart(seen(matrix, colour), seen(matrix, odd))));
      assert.ok(nearest(notFiniteColour(name, isDark)) > 0.11, `NaN ${nearest(notFiniteColour(name, isDark))}`);
      assert.ok(nearest(missingColour(name, isDark)) > 0.06, `missing ${nearest(missingColour(name, isDark))}`);
    });
    test(`${name} ${isDark ? "dark" : "light"}: equal differences look equal to ${eye} eyes`, () => {
      // Both arms of the diverging map end in the background colour, so test only one.
      const arm = name === "diverging" ? colours.slice(0, 127) : colours;
      const steps = arm.slice(16).map((colour, at) => apart(seen(matrix, colour), seen(matrix, arm[at]!)));
      assert.ok(Math.min(...steps) > 0.02, `smallest ${Math.min(...steps)}`);
    });
  }
}

test("lightness increases along the sequential maps", () => {
  for (const name of ["viridis", "cividis"] as const) {
    const lightness = POSITIONS.map((position) => toLab(colourAt(name, position))[0]);
    for (let at = 4; at < lightness.length; at++) assert.ok(lightness[at]! > lightness[at - 4]!, `${name} at ${at}`);
  }
});

test("a palette has one opaque colour per code", () => {
  const colours = new Uint8Array(palette("viridis", false).buffer);
  assert.equal(colours.length, 1024);
  assert.deepEqual([...colours.slice(1020, 1024)], [...notFiniteColour("viridis", false), 255]);
  assert.deepEqual([...colours.slice(0, 4)], [...missingColour("viridis", false), 255]);
});
