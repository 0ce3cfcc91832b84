// Sites as a tree of modules that folds: `layers.3.mlp.weight` lies in `layers`, `layers.3`, `layers.3.mlp`.
// Order is the model's order, given by the caller; nothing is sorted here.

export interface Node {
  /** The dotted name up to here; unique. "" is the root. */
  readonly path: string;
  /** What this node adds to its parent's name; several parts where a node has one child only. */
  readonly label: string;
  readonly depth: number;
  readonly children: readonly Node[];
  /** Positions (in the list given) of all sites below; one for a leaf. */
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
 * The tree of these names. A module that is itself a site (`act/layers.3`) is a leaf beside its children. `positions` are
 * what the tree calls its sites, where the names are some of a longer list.
 */
export function buildTree(names: readonly string[], positions?: readonly number[]): Node {
  const root = draft("", "");
  names.forEach((name, at) => {
    const site = positions ? positions[at]! : at;
    let node = root;
    node.sites.push(site);
    const parts = name.split(".");
    parts.forEach((part, at) => {
      // A leaf gets a key no module can have, so that a site and a module of one name do not become one node.
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
  // A chain of single children (`model.layers`) reads better as one node.
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

/** The rows to draw: leaves, and folded nodes in place of what is below them. */
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

/** Rows as the flat groups that `pool` in heat.ts takes; `tileRow[site]` is the row of a tile, -1 where it has none. */
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
  /** Rows [first, end) the label stands for. */
  readonly first: number;
  readonly end: number;
  readonly isFolded: boolean;
}

/**
 * The labels that fit beside rows of `rowHeight` pixels: a leaf where a row is tall enough to be read, otherwise the
 * deepest module that is. Open modules whose children are labelled come before them, as the header of their rows.
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
    // No child found room: some of very many are named, as on the axis of a chart; of few, this node speaks for all.
    const every = Math.ceil((least * 1.5 * node.children.length) / room);
    if (room < 6 * least || every >= node.children.length / 2) found.push({ node, first, end: row, isFolded: false });
    else sample(node, first, every);
  };
  /** A thin row between others at the top of the model, such as a head of one tensor: where nothing is in its way. */
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

/** A dotted name where there is little room: the last part whole, of those before it first letters and numbers. */
export const abbreviated = (path: string): string => {
  const parts = path.split(".");
  return parts.map((part, n) => (n === parts.length - 1 || /^\d/.test(part) ? part : ([...part][0] ?? ""))).join(".");
};

/** Every foldable node, outermost first. */
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

/** Fold everything at a depth: "show me the model in blocks". Depth 0 unfolds all. */
export const foldedAt = (root: Node, depth: number): Set<string> =>
  new Set(depth <= 0 ? [] : foldable(root).filter((node) => node.depth === depth).map((node) => node.path));

/** The nodes above a path, innermost first; how a leaf finds what to fold. */
export function ancestors(root: Node, site: number): Node[] {
  const found: Node[] = [];
  let node: Node | undefined = root;
  while (node && !node.isLeaf) {
    if (node.depth > 0) found.unshift(node);
    node = node.children.find((child) => child.sites.includes(site));
  }
  return found;
}

/** Sites a filter keeps: words in any order, each a part of the name; `*` stands for anything. */
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
  // Parts in order, found by plain search: no expression is ever built from what a user typed.
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
