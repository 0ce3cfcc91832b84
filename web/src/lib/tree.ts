// Sites as a foldable tree of modules: `layers.3.mlp.weight` belongs to `layers`, `layers.3` and `layers.3.mlp`.
// The caller provides the names in model order; nothing is sorted here.

export interface Node {
  /** The full dotted name; unique. "" for the root. */
  readonly path: string;
  /** The name relative to the parent; several parts for a merged chain of single children. */
  readonly label: string;
  readonly depth: number;
  readonly children: readonly Node[];
  /** Positions in the given list of all sites below this node; one for a leaf. */
  readonly sites: readonly number[];
  readonly isLeaf: boolean;
}

export interface Row {
  readonly node: Node;
  readonly isFolded: boolean;
}

interface Draft {
  label: string;
  path: string;
  children: Map<string, Draft>;
  sites: number[];
  leaf: boolean;
}

const draft = (label: string, path: string): Draft => ({ label, path, children: new Map(), sites: [], leaf: false });

/**
 * Build the tree of these names. A module that is itself a site (`act/layers.3`) becomes a leaf next to its children. Pass
 * `positions` if the names are part of a longer list that sites should refer to.
 */
export function buildTree(names: readonly string[], positions?: readonly number[]): Node {
  const root = draft("", "");
  names.forEach((name, at) => {
    const site = positions ? positions[at]! : at;
    let node = root;
    node.sites.push(site);
    const parts = name.split(".");
    parts.forEach((part, at) => {
      // A leaf gets a distinct key, so that a site and a module with the same name stay separate nodes.
      const isLast = at === parts.length - 1;
      const key = isLast ? `${part}\u0000` : part;
      const path = node.path === "" ? part : `${node.path}.${part}`;
      let child = node.children.get(key);
      if (!child) node.children.set(key, (child = draft(part, isLast ? `${path}\u0000` : path)));
      child.sites.push(site);
      child.leaf = isLast;
      node = child;
    });
  });
  return freeze(root, 0);
}

function freeze(node: Draft, depth: number): Node {
  // Merge a chain of single children (`model.layers`) into one node.
  let { label, path } = node;
  let end = node;
  while (depth > 0 && !end.leaf && end.children.size === 1) {
    end = end.children.values().next().value!;
    label = `${label}.${end.label}`;
    path = end.path;
  }
  const children = [...end.children.values()].map((child) => freeze(child, depth + 1));
  return { path: path.replace("\u0000", ""), label, depth, children, sites: end.sites, isLeaf: end.leaf };
}

/** The visible rows: leaves, and folded nodes instead of their descendants. */
export function visibleRows(root: Node, folded: ReadonlySet<string>): Row[] {
  const rows: Row[] = [];
  const visit = (node: Node): void => {
    if (node.isLeaf) rows.push({ node, isFolded: false });
    else if (node.depth > 0 && folded.has(node.path)) rows.push({ node, isFolded: true });
    else node.children.forEach(visit);
  };
  visit(root);
  return rows;
}

/** Rows as the flat groups that `pool` in heat.ts expects; `tileRow[site]` is the row in a tile, or -1. */
export function rowGroups(rows: readonly Row[], tileRow: Int32Array): { members: Int32Array; starts: Int32Array } {
  const starts = new Int32Array(rows.length + 1);
  let count = 0;
  rows.forEach((row, at) => (starts[at + 1] = count += row.node.sites.length));
  const members = new Int32Array(count);
  let next = 0;
  for (const row of rows) for (const site of row.node.sites) members[next++] = tileRow[site]!;
  return { members, starts };
}

export interface Label {
  readonly node: Node;
  /** The rows [first, end) that the label covers. */
  readonly first: number;
  readonly end: number;
  readonly isFolded: boolean;
}

/**
 * The labels that fit next to rows of `rowHeight` pixels: leaves if the rows are tall enough, otherwise the deepest modules
 * that are.
 */
export function labels(root: Node, folded: ReadonlySet<string>, rowHeight: number, least = 13): Label[] {
  const found: Label[] = [];
  let row = 0;
  const visit = (node: Node): void => {
    const isFolded = !node.isLeaf && node.depth > 0 && folded.has(node.path);
    const first = row;
    if (node.isLeaf || isFolded) {
      row += 1;
      if (rowHeight >= least || hasRoom(node, first)) found.push({ node, first, end: row, isFolded });
      return;
    }
    const at = found.length;
    node.children.forEach(visit);
    if (node.depth === 0) return;
    const room = (row - first) * rowHeight;
    if (found.length > at) return;
    if (room < least) {
      if (hasRoom(node, first)) found.push({ node, first, end: row, isFolded: false });
      return;
    }
    // No child fits: label every n-th child if there are many, otherwise only this node.
    const every = Math.ceil((least * 1.5 * node.children.length) / room);
    if (room < 6 * least || every >= node.children.length / 2) found.push({ node, first, end: row, isFolded: false });
    else sample(node, first, every);
  };
  /** Whether a thin top-level row, such as a head with one tensor, fits without overlapping the previous label. */
  const hasRoom = (node: Node, first: number): boolean => {
    const before = found.at(-1);
    const middle = before ? (before.first + before.end) / 2 : -Infinity;
    return node.depth === 1 && (row - first) * rowHeight >= 11 && ((first + row) / 2 - middle) * rowHeight >= least;
  };
  const sample = (node: Node, first: number, every: number): void => {
    let start = first;
    node.children.forEach((child, number) => {
      const end = start + visibleRows(child, folded).length;
      if (number % every === 0) found.push({ node: child, first: start, end, isFolded: folded.has(child.path) });
      start = end;
    });
  };
  visit(root);
  return found;
}

/** A shortened dotted name: the last part in full, the others as numbers or initials. */
export const abbreviated = (path: string): string => {
  const parts = path.split(".");
  return parts.map((part, n) => (n === parts.length - 1 || /^\d/.test(part) ? part : ([...part][0] ?? ""))).join(".");
};

/** All foldable nodes, outermost first. */
export function foldable(root: Node): Node[] {
  const found: Node[] = [];
  const visit = (node: Node): void => {
    if (node.isLeaf) return;
    if (node.depth > 0) found.push(node);
    node.children.forEach(visit);
  };
  visit(root);
  return found;
}

/** The paths to fold so that the model is shown as blocks of this depth; none for depth 0. */
export const foldedAt = (root: Node, depth: number): Set<string> =>
  new Set(depth <= 0 ? [] : foldable(root).filter((node) => node.depth === depth).map((node) => node.path));

/** The ancestors of a site, innermost first. */
export function ancestors(root: Node, site: number): Node[] {
  const found: Node[] = [];
  let node: Node | undefined = root;
  while (node && !node.isLeaf) {
    if (node.depth > 0) found.unshift(node);
    node = node.children.find((child) => child.sites.includes(site));
  }
  return found;
}

/** Positions of the names that match a filter: all words in any order, with `*` as a wildcard. */
export function filterNames(names: readonly string[], filter: string): number[] {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean).map(matcher);
  const kept: number[] = [];
  names.forEach((name, at) => {
    const text = name.toLowerCase();
    if (words.every((word) => word(text))) kept.push(at);
  });
  return kept;
}

function matcher(word: string): (text: string) => boolean {
  if (!word.includes("*")) return (text) => text.includes(word);
  // Search for the parts in order; never build a regular expression from user input.
  const parts = word.split("*").filter(Boolean);
  return (text) => {
    let at = 0;
    for (const part of parts) {
      const found = text.indexOf(part, at);
      if (found < 0) return false;
      at = found + part.length;
    }
    return true;
  };
}
