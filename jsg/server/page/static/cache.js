// The view of the cache: the radix tree as bars, each from the tokens before it to its last one, while it changes.

import { TreeCanvas } from "./canvas.js";
import { button, h, replace } from "./dom.js";
import { arrange, Past, RadixTree } from "./radix.js";

const RETRY_MS = 1500;
const HIDDEN_MS = 60_000; // a page that nobody has seen for so long stops looking, because a server has few places
const PATH = "debug/radix/events";

export const view = {
  id: "cache",
  title: "Cache",
  mount(root, app) {
    watch?.end();
    watch = new Watch(root, app);
    watch.follow();
  },
  unmount() {
    watch?.end();
    watch = null;
  },
};

let watch = null;

/** What is shown while the tab is open. */
class Watch {
  #abort = new AbortController();
  #reading = new AbortController(); // ends when another part of the tree is chosen
  #root = null; // the node whose subtree is shown; null for the whole tree
  #app;
  #tree = new RadixTree();
  #past = new Past();
  #counts = { hit: 0, insert: 0, split: 0, evict: 0 };
  #moment = null; // the time that is replayed; null shows what is there now
  #wantsText = true;
  #parts;
  #canvas;

  constructor(root, app) {
    this.#app = app;
    this.#canvas = new TreeCanvas((bar, tree) => this.#describe(bar, tree));
    this.#parts = {
      pool: h("div", { class: "pool-bar" }),
      summary: h("p", { class: "hint" }),
      when: h("input", { type: "range", id: "moment", min: 0, max: 0, step: "any", input: () => this.#replay() }),
      told: h("span", { class: "hint" }),
      live: button("Live", () => this.#resume(), { "aria-pressed": "true" }),
      engine: h("select", { hidden: true, "aria-label": "Engine", change: () => this.#look(null) }, engineOption(0)),
      whole: button("Whole tree", () => this.#look(null), { hidden: true }),
      details: h("div", { class: "details", "aria-live": "polite" }),
    };
    const { pool, summary, when, told, live, engine, whole, details } = this.#parts;
    const label = h("label", { for: "moment" }, "Last minutes");
    const replayed = h("div", { class: "row replay" }, label, when, told, live, engine, whole);
    const side = h("aside", {}, h("h2", {}, "Node"), details, h("h2", {}, "Colours"), legend());
    replace(root, pool, summary, replayed, h("div", { class: "tree" }, this.#canvas.element, side));
    this.#describe(null);
    document.addEventListener("visibilitychange", () => this.#rest(), { signal: this.#abort.signal });
  }

  end() {
    this.#abort.abort();
    this.#reading.abort();
    this.#canvas.end();
  }

  /** Shows the subtree of a node, or the whole tree for null. */
  #look(root) {
    this.#root = root;
    this.#tree = new RadixTree();
    this.#past = new Past();
    this.#parts.whole.hidden = root === null;
    this.#resume();
    this.#reading.abort();
  }

  /** Ends the stream of a page that stays hidden. It is begun again when the page is seen. */
  #rest() {
    setTimeout(() => document.hidden && this.#reading.abort(), HIDDEN_MS);
  }

  /** The choice of an engine, where there are several. */
  async #offerEngines() {
    const loads = await this.#app.fetchJson("get_load", { signal: this.#abort.signal });
    replace(this.#parts.engine, loads.map((_, index) => engineOption(index)));
    this.#parts.engine.hidden = loads.length < 2;
  }

  /** Reads the server's stream until the tab is left. A stream that ends, as when a server restarts, is begun again. */
  async follow() {
    await this.#offerEngines().catch(() => {}); // what is wrong is said by the stream, too
    while (!this.#abort.signal.aborted) {
      if (document.hidden) await isSeen();
      try {
        await this.#read();
      } catch (error) {
        if (this.#abort.signal.aborted) return;
        if (error.name === "AbortError") continue; // another part was chosen
        if (error.status === 403 && this.#wantsText) {
          this.#wantsText = false; // the texts are for the admin key only
          continue;
        }
        this.#parts.summary.textContent = error.message;
        if (error.status === 404 && this.#root !== null) {
          this.#look(null); // the node is gone
          continue;
        }
        if (error.status >= 400 && error.status < 500) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  async #read() {
    this.#reading = new AbortController();
    const query = new URLSearchParams();
    if (this.#wantsText) query.set("text", "true");
    if (this.#parts.engine.value !== "0") query.set("engine", this.#parts.engine.value);
    if (this.#root !== null) query.set("root", String(this.#root));
    for await (const { data } of this.#app.stream(`${PATH}?${query}`, { signal: this.#reading.signal })) {
      const event = JSON.parse(data);
      const changed = this.#tree.apply(event);
      if (event.type === "delta") for (const [kind] of changed) this.#counts[kind] += 1;
      this.#past.note(event, this.#tree);
      this.#parts.when.min = String(this.#past.begin);
      this.#parts.when.max = String(this.#tree.time);
      if (this.#moment === null) this.#show(this.#tree, changed);
    }
  }

  #replay() {
    this.#moment = Number(this.#parts.when.value);
    this.#parts.live.setAttribute("aria-pressed", "false");
    this.#show(this.#past.at(this.#moment), []);
  }

  #resume() {
    this.#moment = null;
    this.#parts.live.setAttribute("aria-pressed", "true");
    this.#show(this.#tree, []);
  }

  #show(tree, changed) {
    this.#canvas.draw(arrange(tree), changed, tree);
    showPool(this.#parts.pool, tree.pool);
    const tokens = [...tree.nodes.values()].reduce((sum, node) => sum + node.length, 0);
    const { hit, insert, split, evict } = this.#counts;
    const isFolded = tree.numNodes > tree.nodes.size;
    const folded = isFolded ? ` (${tree.nodes.size} shown)` : "";
    const counts = `Since you look: ${hit} hits, ${insert} new, ${split} split, ${evict} evicted.`;
    const seen = isFolded ? "" : counts; // a folded tree does not tell what has happened in it
    this.#parts.summary.textContent = `${tree.numNodes} nodes${folded}, ${tokens} tokens. ${seen}`.trim();
    const { when, told } = this.#parts;
    if (this.#moment === null) when.value = when.max;
    const ago = Number(when.max) - (this.#moment ?? Number(when.max));
    told.textContent = ago < 1 ? "now" : `${Math.round(ago)} s ago`;
  }

  #describe(bar, tree) {
    if (bar === null) {
      replace(this.#parts.details, h("p", {}, "Point at a bar, or use the arrow keys."));
      return;
    }
    const { node, begin, end } = bar;
    const folded = tree.folded.get(node.id);
    const rows = [
      ["Tokens", `${node.length} (from ${begin} to ${end})`],
      ["Holders", node.isLocked ? `${node.holders}: locked` : `${node.holders}: evictable`],
      ["Hits", String(node.hits)],
      ...(node.isUsable ? [] : [["Goes on", "no: what a prompt needs that goes on at its end is gone"]]),
      ["Last used", new Date(1000 * node.seen).toLocaleTimeString()], // which stays right while nothing is told
      ...(folded ? [["Folded below", `${folded.nodes} nodes, ${folded.tokens} tokens`]] : []),
      ...(tree.texts.has(node.id) ? [["Text", h("pre", { class: "code" }, tree.texts.get(node.id))]] : []),
    ];
    const inside = folded && button("Look inside", () => this.#look(node.id));
    const facts = rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
    replace(this.#parts.details, h("dl", {}, facts), inside);
  }
}

/** The bar is the equation that the engine checks: these terms add up to the pool. */
function showPool(element, pool) {
  if (!pool) return;
  const { total, ...terms } = pool;
  const named = Object.entries(terms).filter(([, tokens]) => typeof tokens === "number");
  const parts = named.map(([name, tokens]) => {
    const part = h("span", { class: `share ${name}`, title: `${name}: ${tokens} tokens` });
    part.style.flexGrow = String(tokens);
    return part;
  });
  const equation = `${total} tokens = ${named.map(([name, tokens]) => `${tokens} ${name}`).join(" + ")}`;
  replace(element, h("div", { class: "shares", "aria-hidden": "true" }, parts), h("p", { class: "hint" }, equation));
}

function engineOption(index) {
  return h("option", { value: index }, `Engine ${index}`);
}

/** Waits until the page is in sight. */
function isSeen() {
  return new Promise((resolve) => {
    const look = () => document.hidden || (document.removeEventListener("visibilitychange", look), resolve());
    document.addEventListener("visibilitychange", look);
  });
}

function legend() {
  const kinds = {
    locked: "locked by requests",
    evictable: "evictable, paler with age",
    hit: "hit",
    insert: "new or split",
    evict: "evicted below",
  };
  const items = Object.entries(kinds).map(([kind, text]) => h("li", {}, h("i", { class: kind }), text));
  return h("ul", { class: "legend" }, items);
}
