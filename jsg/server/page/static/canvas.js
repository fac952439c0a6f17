// Draws the bars of a tree. Only those in sight are drawn, and only when something changes.

import { h } from "./dom.js";

const ROW = { least: 5, most: 22 };
const FLASH_MS = 700;
const FADED_S = 600;
const LABEL_PX = 46;
const COLOURS = {
  locked: "--accent",
  evictable: "--good",
  hit: "--warn",
  insert: "--flash-new",
  split: "--flash-new",
  evict: "--bad",
  ink: "--ink",
};

export class TreeCanvas {
  #shown = { bars: [], numRows: 0, maxTokens: 1 };
  #tree = null;
  #flashes = new Map(); // id of a node → [kind, when it began]
  #selected = null;
  #told = {}; // the chosen node as it was when something was said of it
  #isPinned = false; // by a click or a key, until the next one; else the pointer chooses
  #frame = 0;
  #canvas = h("canvas", { "aria-hidden": "true" });
  #tall = h("div", {});
  #select;
  #resized = new ResizeObserver(() => this.#ask());

  /** @param {(bar: object|null, tree: object) => void} select is told which bar a person has chosen */
  constructor(select) {
    this.#select = select;
    this.element = h("div", {
      class: "bars",
      role: "group",
      tabindex: 0,
      "aria-label": "Radix tree. Arrow keys go to the parent, the first child, and the bars beside.",
      scroll: () => this.#ask(),
      keydown: (event) => this.#key(event),
      click: (event) => this.#pin(this.#barAt(event)),
      mousemove: (event) => this.#isPinned || this.#choose(this.#barAt(event) ?? this.#selected),
    });
    this.element.append(this.#canvas, this.#tall);
    this.#resized.observe(this.element);
  }

  end() {
    this.#resized.disconnect();
    cancelAnimationFrame(this.#frame);
  }

  /** Shows a tree as `arrange` has placed it; `changed` lists [kind, id] of what flashes. */
  draw(arranged, changed, tree) {
    const now = performance.now();
    this.#forget(now); // also here: what is not in sight is not painted
    for (const [kind, id] of changed) this.#flashes.set(id, [kind, now]);
    this.#shown = arranged;
    this.#tree = tree;
    if (this.#selected) this.#find(this.#selected);
    this.#ask();
  }

  #ask() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#paint();
      if (this.#flashes.size) this.#ask();
    });
  }

  get #rowHeight() {
    const fitting = this.element.clientHeight / Math.max(1, this.#shown.numRows);
    return Math.min(ROW.most, Math.max(ROW.least, fitting));
  }

  #paint() {
    const { clientWidth: width, clientHeight: height, scrollTop } = this.element;
    const row = this.#rowHeight;
    const scale = (width - 2) / this.#shown.maxTokens;
    const ratio = window.devicePixelRatio || 1;
    this.#tall.style.height = `${Math.max(0, this.#shown.numRows * row - height)}px`;
    if (this.#canvas.width !== width * ratio || this.#canvas.height !== height * ratio) {
      [this.#canvas.width, this.#canvas.height] = [width * ratio, height * ratio];
      [this.#canvas.style.width, this.#canvas.style.height] = [`${width}px`, `${height}px`];
    }
    const context = this.#canvas.getContext("2d");
    const colours = coloursOf(this.element);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const now = performance.now();
    for (const bar of this.#shown.bars) {
      const top = bar.top * row - scrollTop;
      const tall = bar.rows * row;
      if (top + tall < 0 || top > height) continue;
      const place = [bar.begin * scale, top, Math.max(1.5, (bar.end - bar.begin) * scale - 1), Math.max(1, tall - 1)];
      this.#paintBar(context, bar, place, colours, now);
    }
    this.#forget(now);
  }

  #forget(now) {
    for (const [id, [, begun]] of this.#flashes) if (now - begun > FLASH_MS) this.#flashes.delete(id);
  }

  #paintBar(context, { node }, [left, top, width, height], colours, now) {
    context.globalAlpha = node.isLocked ? 0.85 : paleness(this.#tree.time - node.seen);
    context.fillStyle = node.isLocked ? colours.locked : colours.evictable;
    context.fillRect(left, top, width, height);
    const flash = this.#flashes.get(node.id);
    if (flash && now - flash[1] < FLASH_MS) {
      context.globalAlpha = 1 - (now - flash[1]) / FLASH_MS;
      context.fillStyle = colours[flash[0]];
      context.fillRect(left, top, width, height);
    }
    context.globalAlpha = 1;
    if (this.#selected?.node.id === node.id) {
      context.strokeStyle = colours.ink;
      context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
    }
    if (height >= 12 && width >= LABEL_PX) this.#label(context, node, left, top, width, height, colours);
  }

  #label(context, node, left, top, width, height, colours) {
    const size = node.isFolded ? `${node.length} + folded` : String(node.length);
    const text = this.#tree.texts.get(node.id)?.trim() || size;
    const most = Math.floor((width - 8) / 6);
    context.fillStyle = colours.ink;
    const middle = Math.max(top, 0) + Math.min(height, ROW.most) / 2;
    context.fillText(text.slice(0, most).replace(/\s+/g, " "), left + 4, middle);
  }

  #barAt(event) {
    const bounds = this.element.getBoundingClientRect();
    const token = ((event.clientX - bounds.left) / (this.element.clientWidth - 2)) * this.#shown.maxTokens;
    const row = (event.clientY - bounds.top + this.element.scrollTop) / this.#rowHeight;
    const isAt = ({ begin, end, top, rows }) => token >= begin && token < end && row >= top && row < top + rows;
    return this.#shown.bars.find(isAt) ?? null;
  }

  /** The bar that was chosen, in a new arrangement. What is said of it changes only if it has changed. */
  #find({ node: old }) {
    const bar = this.#shown.bars.find(({ node }) => node.id === old.id) ?? null;
    const isAsBefore = ["length", "holders", "hits"].every((name) => bar?.node[name] === this.#told[name]);
    if (bar === null) this.#isPinned = false;
    if (isAsBefore) this.#selected = bar;
    else this.#choose(bar);
  }

  #pin(bar) {
    this.#isPinned = bar !== null;
    this.#choose(bar);
  }

  #choose(bar) {
    if (bar && bar === this.#selected) return;
    this.#selected = bar;
    this.#told = { ...bar?.node };
    this.#select(bar, this.#tree);
    this.#ask();
  }

  #key(event) {
    const bars = this.#shown.bars;
    if (!bars.length || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const at = Math.max(0, bars.findIndex((bar) => bar.node.id === this.#selected?.node.id));
    const { node, top, rows, begin } = bars[at];
    const next = {
      ArrowLeft: () => bars.find((bar) => bar.node.id === node.parent),
      ArrowRight: () => bars[at + 1]?.node.parent === node.id && bars[at + 1],
      ArrowDown: () => bars.find((bar) => bar.top >= top + rows && bar.begin <= begin),
      ArrowUp: () => bars.findLast((bar) => bar.top + bar.rows <= top && bar.begin <= begin),
    }[event.key];
    this.#pin((this.#selected && next?.()) || bars[at]);
    this.#reveal(this.#selected);
  }

  #reveal(bar) {
    const top = bar.top * this.#rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop || top > scrollTop + clientHeight - ROW.most) this.element.scrollTop = top - clientHeight / 2;
  }
}

/** From 0.75 for what was just used to 0.2 for what was not used for ten minutes. */
function paleness(age) {
  const share = Math.log1p(Math.max(0, age)) / Math.log1p(FADED_S);
  return 0.75 - 0.55 * Math.min(1, share);
}

function coloursOf(element) {
  const style = getComputedStyle(element);
  const colours = Object.entries(COLOURS).map(([name, property]) => [name, style.getPropertyValue(property).trim()]);
  return Object.fromEntries(colours);
}
