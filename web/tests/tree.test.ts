import assert from "node:assert/strict";
import { test } from "node:test";
import { abbreviated, ancestors, buildTree, filterNames, foldable, foldedAt, labels, rowGroups, visibleRows } from "../src/lib/tree";

const NAMES = ["wte.weight", "h.0.attn.weight", "h.0.mlp.weight", "h.1.attn.weight", "h.1.mlp.weight", "head"];

test("rows are in model order", () => {
  const rows = visibleRows(buildTree(NAMES), new Set());
  assert.deepEqual(rows.map((row) => row.node.sites[0]), [0, 1, 2, 3, 4, 5]);
  assert.deepEqual(rows.map((row) => row.node.path), NAMES);
});

test("a folded block is one row with all its sites", () => {
  const rows = visibleRows(buildTree(NAMES), new Set(["h.0"]));
  assert.deepEqual(rows.map((row) => row.node.path), ["wte.weight", "h.0", "h.1.attn.weight", "h.1.mlp.weight", "head"]);
  assert.deepEqual(rows[1]!.node.sites, [1, 2]);
  const groups = rowGroups(rows, Int32Array.from([5, 4, 3, 2, 1, -1]));
  assert.deepEqual([...groups.starts], [0, 1, 3, 4, 5, 6]);
  assert.deepEqual([...groups.members], [5, 4, 3, 2, 1, -1]);
});

test("a site that is also a module keeps its children", () => {
  const rows = visibleRows(buildTree(["h", "h.0", "h.0.mlp"]), new Set());
  assert.deepEqual(rows.map((row) => row.node.sites), [[0], [1], [2]]);
});

test("folding by depth folds all nodes of that depth", () => {
  const root = buildTree(NAMES);
  assert.deepEqual([...foldedAt(root, 1)], ["h"]);
  assert.deepEqual([...foldedAt(root, 2)], ["h.0", "h.1"]);
  assert.equal(foldedAt(root, 0).size, 0);
  assert.deepEqual(foldable(root).map((node) => node.path), ["h", "h.0", "h.1"]);
});

test("thin rows are labelled by module, tall rows by name", () => {
  const root = buildTree(NAMES);
  assert.deepEqual(labels(root, new Set(), 20).map((label) => label.node.path), NAMES);
  assert.deepEqual(labels(root, new Set(), 7).map((label) => label.node.path), ["h.0", "h.1"]);
  assert.deepEqual(labels(root, new Set(), 4).map((label) => [label.node.path, label.first, label.end]), [["h", 1, 5]]);
  assert.deepEqual(labels(root, new Set(), 1), []);
});

test("a single top-level row is labelled if there is room", () => {
  const root = buildTree(["token.weight", "position.weight", "h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias", "head.weight"]);
  assert.deepEqual(labels(root, new Set(), 11).map((label) => label.node.path), ["token", "h.0", "h.1", "head"].map((path) => (path.startsWith("h.") ? path : `${path}.weight`)));
});

test("shortened names keep the block numbers", () => {
  assert.deepEqual(["blocks.12.attn.qkv", "head", "h.0.", ""].map(abbreviated), ["b.12.a.qkv", "head", "h.0.", ""]);
});

test("of a hundred thin blocks, every n-th is labelled", () => {
  const root = buildTree(Array.from({ length: 400 }, (_, i) => `h.${i >> 2}.w${i & 3}`));
  const named = labels(root, new Set(), 1.5).map((label) => [label.node.path, label.first, label.end]);
  assert.deepEqual(named.slice(0, 2), [["h.0", 0, 4], ["h.4", 16, 20]]);
  assert.equal(named.length, 25);
});

test("ancestors of a leaf, innermost first", () => {
  assert.deepEqual(ancestors(buildTree(NAMES), 3).map((node) => node.path), ["h.1", "h"]);
});

test("filters support words and wildcards, never regular expressions", () => {
  assert.deepEqual(filterNames(NAMES, "attn"), [1, 3]);
  assert.deepEqual(filterNames(NAMES, "weight 1"), [3, 4]);
  assert.deepEqual(filterNames(NAMES, "h.*.mlp"), [2, 4]);
  assert.deepEqual(filterNames(NAMES, "(a+)+$["), []);
  assert.deepEqual(filterNames(NAMES, ""), [0, 1, 2, 3, 4, 5]);
});

test("a tree of 20,000 names can be built", () => {
  const names = Array.from({ length: 20_000 }, (_, i) => `layers.${i >> 3}.block.${i & 7}.weight`);
  assert.equal(visibleRows(buildTree(names), new Set()).length, 20_000);
});
