import assert from "node:assert/strict";
import { test } from "node:test";
import { ago, bytes, count, counted, duration, exact, number, percent } from "../src/lib/format";

test("small numbers are never written as zero", () => {
  assert.equal(number(3e-5), "3×10⁻⁵");
  assert.equal(number(1e-5), "10⁻⁵");
  assert.equal(number(-1.25e-12), "−1.25×10⁻¹²");
  assert.equal(number(0.0012345), "0.001234");
});

test("missing and non-finite values have names", () => {
  assert.equal(number(NaN), "NaN");
  assert.equal(number(Infinity), "∞");
  assert.equal(number(-Infinity), "−∞");
  assert.equal(number(null), "–");
});

test("four significant digits and thousands separators", () => {
  assert.equal(number(0.123456), "0.1235");
  assert.equal(number(12345), "12,345");
  assert.equal(number(12345.678), "12,346");
  assert.equal(number(1234567), "1.235×10⁶");
  assert.equal(exact(0.123456789), "0.123456789");
});

test("units", () => {
  assert.equal(count(1234567), "1.2 M");
  assert.equal(bytes(1536), "1.5 KiB");
  assert.equal(percent(0.0123), "1.2 %");
  assert.equal(percent(1.234), "123 %");
  assert.equal(duration(0.5), "500 ms");
  assert.equal(duration(3700), "1 h 1 min");
  assert.equal(ago(1000, 1000 + 150), "2 min ago");
});

test("counts agree with their nouns", () => {
  assert.deepEqual([0, 1, 2, 1000].map((n) => counted(n, "run")), ["0 runs", "1 run", "2 runs", "1,000 runs"]);
});
