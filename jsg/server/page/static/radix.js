// A copy of the server's radix tree, kept up to date by its stream of changes, and its past minutes.

const FLAG_LOCKED = 1;
const FLAG_FOLDED = 2;
const FLAG_UNUSABLE = 4;
const KEPT_S = 300;
const CHECKPOINT_S = 20;

/**
 * The tree at one moment. Nodes are plain objects:
 * {id, parent, length, holders, seen, hits, isLocked, isFolded, children}.
 */
export class RadixTree {
  constructor() {
    this.nodes = new Map();
    this.roots = new Set();
    this.pool = null;
    this.texts = new Map();
    this.folded = new Map();
    this.time = 0;
    this.numNodes = 0;
  }

  /** Takes a snapshot or a delta of the server. Returns what happened to which nodes: a list of [kind, id]. */
  apply(event) {
    this.time = event.time;
    this.pool = event.pool ?? this.pool;
    if (event.type === "snapshot") {
      const before = this.nodes;
      this.#read(event);
      return before.size ? [...this.#differences(before)] : [];
    }
    for (const [id, text] of Object.entries(event.texts ?? {})) this.texts.set(Number(id), text);
    const changed = event.changes.map((change) => this.#change(change)).filter(Boolean);
    this.numNodes = event.num_nodes ?? this.nodes.size; // others may see more of the tree
    return changed;
  }

  /** A tree that changes apart from this one. */
  copy() {
    const other = new RadixTree();
    Object.assign(other, this, { nodes: new Map(), roots: new Set(this.roots), texts: new Map(this.texts) });
    for (const [id, node] of this.nodes) other.nodes.set(id, { ...node, children: new Set(node.children) });
    return other;
  }

  #read(snapshot) {
    this.nodes = new Map();
    this.roots = new Set();
    this.numNodes = snapshot.num_nodes;
    this.folded = new Map(Object.entries(snapshot.aggregates ?? {}).map(([id, value]) => [Number(id), value]));
    if (snapshot.texts) this.texts = new Map(Object.entries(snapshot.texts).map(([id, text]) => [Number(id), text]));
    for (const [id, parent, length, holders, age, hits, flags] of snapshot.nodes) {
      this.nodes.set(id, {
        id,
        parent,
        length,
        holders,
        hits,
        seen: snapshot.time - age,
        isLocked: (flags & FLAG_LOCKED) !== 0,
        isFolded: (flags & FLAG_FOLDED) !== 0,
        isUsable: (flags & FLAG_UNUSABLE) === 0,
        children: new Set(),
      });
    }
    for (const node of this.nodes.values()) this.#siblings(node.parent).add(node.id);
  }

  /** What has happened between two snapshots. A server tells no changes of a tree that is too large. */
  *#differences(before) {
    for (const [id, node] of this.nodes) {
      const old = before.get(id);
      if (!old) yield ["insert", id];
      else if (node.hits > old.hits) yield ["hit", id];
    }
    if (this.numNodes > this.nodes.size) return; // what is gone may be folded
    for (const [id, old] of before) if (!this.nodes.has(id)) yield ["evict", old.parent];
  }

  #siblings(parent) {
    return this.nodes.get(parent)?.children ?? this.roots;
  }

  #change([kind, id, ...rest]) {
    switch (kind) {
      case "insert": {
        const [parent, length] = rest;
        const fresh = { holders: 0, hits: 0, seen: this.time, isLocked: false, isFolded: false };
        this.nodes.set(id, { id, parent, length, ...fresh, isUsable: true, children: new Set() });
        this.#siblings(parent).add(id);
        return ["insert", id];
      }
      case "split": {
        const [lowerId, length] = rest; // `id` is the new upper part of the edge of the lower one
        const lower = this.nodes.get(lowerId);
        if (!lower) return null;
        const upper = { ...lower, id, length, isFolded: false, children: new Set([lowerId]) };
        this.#siblings(lower.parent).delete(lowerId);
        this.#siblings(lower.parent).add(id);
        this.nodes.set(id, upper);
        lower.parent = id;
        lower.length -= length;
        return ["split", id];
      }
      case "evict": {
        const node = this.nodes.get(id);
        if (!node) return null;
        this.#siblings(node.parent).delete(id);
        this.nodes.delete(id);
        this.texts.delete(id);
        return ["evict", node.parent];
      }
      case "hit": {
        const node = this.nodes.get(id);
        if (!node) return null;
        node.hits = rest[0] ?? node.hits + 1;
        node.seen = this.time;
        return ["hit", id];
      }
      case "hold": {
        const node = this.nodes.get(id);
        if (!node) return null;
        [node.holders] = rest;
        node.isLocked = node.holders > 0;
        return null;
      }
      case "use": {
        const node = this.nodes.get(id);
        if (node) node.isUsable = rest[0] === 1;
        return null;
      }
      case "clear":
        this.nodes.clear();
        this.roots.clear();
        return null;
      default:
        return null; // of a later version
    }
  }
}

/** The last minutes: trees at some moments, and the events since each of them. */
export class Past {
  #events = [];
  #checkpoints = [];

  /** Notes an event, and the tree behind it. */
  note(event, tree) {
    const { texts, ...bare } = event; // many snapshots with their texts would be too much
    this.#events.push(event.type === "snapshot" ? bare : event);
    const last = this.#checkpoints.at(-1);
    if (!last || tree.time - last.time >= CHECKPOINT_S) this.#checkpoints.push(tree.copy());
    const oldest = tree.time - KEPT_S;
    while (this.#checkpoints.length > 1 && this.#checkpoints[1].time <= oldest) this.#checkpoints.shift();
    while (this.#events.length && this.#events[0].time < this.#checkpoints[0].time) this.#events.shift();
  }

  /** The first moment that is still known. */
  get begin() {
    return this.#checkpoints[0]?.time ?? 0;
  }

  /** The tree as it was. */
  at(time) {
    const before = this.#checkpoints.findLast((tree) => tree.time <= time) ?? this.#checkpoints[0];
    if (!before) return new RadixTree();
    const tree = before.copy();
    for (const event of this.#events) {
      if (event.time > before.time && event.time <= time) tree.apply(event);
    }
    return tree;
  }
}

/**
 * Places nodes as bars: from the tokens before a node to its last one, and over the rows of its leaves.
 * Returns {bars: [{node, begin, end, top, rows}], numRows, maxTokens}; parents come before their children.
 */
export function arrange(tree) {
  const bars = [];
  let numRows = 0;
  let maxTokens = 1;
  const waiting = [...tree.roots].reverse().map((id) => [id, 0]);
  const open = []; // bars whose subtrees are being placed
  while (waiting.length) {
    const [id, begin] = waiting.pop();
    if (id === null) {
      const bar = open.pop();
      bar.rows = Math.max(1, numRows - bar.top);
      continue;
    }
    const node = tree.nodes.get(id);
    const bar = { node, begin, end: begin + node.length, top: numRows, rows: 1 };
    bars.push(bar);
    maxTokens = Math.max(maxTokens, bar.end);
    if (node.children.size === 0) {
      numRows += 1;
      continue;
    }
    open.push(bar);
    waiting.push([null, 0]);
    for (const child of [...node.children].reverse()) waiting.push([child, bar.end]);
  }
  return { bars, numRows, maxTokens };
}
