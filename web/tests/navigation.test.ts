import assert from "node:assert/strict";
import { test } from "node:test";
import { between, broughtIntoView, cellAt, walked, wheeled } from "../src/components/heat/navigation";

const LIMITS = { first: 0, end: 1000, rows: 40 };
const VIEW = { from: 100, to: 200, top: 10, bottom: 20 };
const SIZE = { width: 500, height: 100 };
const STILL = { deltaX: 0, deltaY: 0, shiftKey: false, altKey: false, ctrlKey: false };

test("a pixel maps to a cell, clamped at the edges", () => {
  assert.deepEqual(cellAt(252, 35, VIEW, SIZE, LIMITS), { step: 150, row: 13 });
  assert.deepEqual(cellAt(-9e9, 9e9, VIEW, SIZE, LIMITS), { step: 0, row: 39 });
  assert.deepEqual(cellAt(10, 10, { from: 0, to: 1, top: 0, bottom: 1 }, SIZE, { first: 0, end: 0, rows: 0 }), { step: 0, row: 0 });
});

test("a selection includes both corners, in any order", () => {
  const area = { from: 3, to: 8, top: 1, bottom: 5 };
  assert.deepEqual(between({ step: 7, row: 1 }, { step: 3, row: 4 }), area);
  assert.deepEqual(between({ step: 3, row: 4 }, { step: 7, row: 1 }), area);
});

test("arrow keys move by heatmap columns, not by steps", () => {
  assert.equal(walked("ArrowRight", { step: 154, row: 0 }, { from: 150, to: 160 }, VIEW, LIMITS)?.step, 160);
  assert.equal(walked("ArrowLeft", { step: 154, row: 0 }, { from: 150, to: 160 }, VIEW, LIMITS)?.step, 149);
  assert.equal(walked("End", { step: 5, row: 0 }, null, VIEW, LIMITS)?.step, 999);
  assert.equal(walked("PageDown", { step: 5, row: 38 }, null, VIEW, LIMITS)?.row, 39);
  assert.equal(walked("x", { step: 5, row: 0 }, null, VIEW, LIMITS), null);
});

test("the view pans only as far as needed to show a cell", () => {
  assert.deepEqual(broughtIntoView({ step: 150, row: 12 }, VIEW), VIEW);
  assert.deepEqual(broughtIntoView({ step: 200, row: 9 }, VIEW), { from: 101, to: 201, top: 9, bottom: 19 });
});

test("the wheel zooms steps, or rows with Alt, and pans sideways", () => {
  const zoomed = wheeled({ ...STILL, deltaY: -250 }, [250, 50], VIEW, SIZE, LIMITS);
  assert.ok(zoomed.to - zoomed.from < 60 && zoomed.bottom - zoomed.top === 10);
  const rows = wheeled({ ...STILL, deltaY: -250, altKey: true }, [250, 50], VIEW, SIZE, LIMITS);
  assert.ok(rows.to - rows.from === 100 && rows.bottom - rows.top < 6);
  assert.equal(wheeled({ ...STILL, deltaX: 50 }, [250, 50], VIEW, SIZE, LIMITS).from, 110);
});
