// The view "Engine": what runs now, how full the KV pool is, and the memory plan.

import { freshId, h, replace } from "./dom.js";
import { between, readings } from "./metrics.js";
import { Sparkline } from "./sparkline.js";

const POLL_MS = 1000;
const STATES = [
  ["protected", "in use"],
  ["uncached", "in use, not in the tree yet"],
  ["evictable", "cached"],
  ["free", "free"],
];

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)} %`;

/** The tiles: a name, how its value is written, what it means, and the value at the upper edge of its curve. */
const TILES = [
  ["running", "Running", whole, "requests in the batch"],
  ["waiting", "Waiting", whole, "requests in the queue"],
  ["batch", "Batch", (value) => value.toFixed(1), "tokens made by a step"],
  ["rate", "Throughput", whole, "tokens made in a second"],
  ["step_ms", "Step time", (value) => `${value.toFixed(value < 10 ? 2 : 0)} ms`, "of the engine"],
  ["usage", "KV use", percent, "of the pool, by requests", 1],
  ["hit", "Hit rate", percent, "of prompt tokens", 1],
  ["compiled", "Compiles", whole, "programs since the start"],
  ["retracts", "Retracts", whole, "requests that made room"],
];

class Engine {
  #before = null;
  #timer = null;
  #stopped = new AbortController();

  constructor(root, app) {
    this.app = app;
    this.tiles = new Map(TILES.map((tile) => [tile[0], makeTile(...tile)]));
    this.pool = makePool();
    this.plan = h("dl", { class: "facts-list" });
    this.engines = h("div", {});
    this.waits = h("p", { class: "hint" });
    this.note = h("p", { class: "hint", role: "status" });
    replace(
      root,
      section("Now", h("ul", { class: "tiles" }, [...this.tiles.values()].map((tile) => tile.element)), this.waits, this.note),
      section("KV pool", this.pool.element, this.engines),
      section("Memory plan and model", this.plan),
    );
  }

  async start() {
    try {
      const info = await this.app.fetchJson("server_info", { signal: this.#stopped.signal });
      replace(this.plan, factsOf(info).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
      this.#poll();
    } catch (error) {
      this.#fail(error);
    }
  }

  stop() {
    clearTimeout(this.#timer);
    this.#stopped.abort();
  }

  async #poll() {
    try {
      if (!document.hidden) await this.#scrape();
      this.#timer = setTimeout(() => this.#poll(), POLL_MS);
    } catch (error) {
      this.#fail(error);
    }
  }

  async #scrape() {
    const { signal } = this.#stopped;
    const { fetchText, fetchJson } = this.app;
    const [text, load] = await Promise.all([fetchText("metrics", { signal }), fetchJson("get_load", { signal })]);
    const now = readings(text, performance.now());
    const values = { ...now, ...between(this.#before ?? now, now) };
    if (now.prompt > 0) values.hit ??= now.cached / now.prompt;
    for (const [name, tile] of this.tiles) tile.show(values[name]);
    this.waits.textContent = writtenWaits(now.waits);
    this.pool.show(now);
    replace(this.engines, load.length > 1 && enginesTable(load));
    this.#before = now;
    this.note.textContent = now.pending > 0 ? `${now.pending} programs are still being compiled.` : "";
  }

  /** Says what is wrong, and tries again: a server that was started anew is found. */
  #fail(error) {
    if (this.#stopped.signal.aborted) return;
    this.note.textContent = error.message;
    if (error.status !== 401 && error.status !== 403) this.#timer = setTimeout(() => this.start(), 3 * POLL_MS);
  }
}

function section(title, ...children) {
  const id = freshId("section");
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), children);
}

function makeTile(name, title, write, meaning, top = null) {
  const value = h("span", { class: "value" }, "–");
  const curve = new Sparkline(top);
  const [head, hint] = [h("span", { class: "name" }, title), h("span", { class: "hint" }, meaning)];
  const element = h("li", { class: "tile" }, head, value, hint, curve.element);
  const show = (given) => {
    if (given !== null && given !== undefined) value.textContent = write(given);
    curve.add(given);
  };
  return { element, show };
}

/** A bar of who owns the tokens of the pool. */
function makePool() {
  const bar = h("div", { class: "pool", role: "img" });
  const parts = STATES.map(([state]) => h("span", { class: `part ${state}` }));
  const legend = h("ul", { class: "legend" });
  replace(bar, parts);
  const show = ({ kv, capacity }) => {
    STATES.forEach(([state], index) => parts[index].style.setProperty("flex-grow", String(kv[state] ?? 0)));
    const texts = STATES.map(([state, name]) => `${whole(kv[state] ?? 0)} ${name}`);
    bar.setAttribute("aria-label", `Of ${whole(capacity)} tokens: ${texts.join(", ")}`);
    const key = (state) => h("span", { class: `key ${state}`, "aria-hidden": "true" });
    replace(legend, STATES.map(([state], index) => h("li", {}, key(state), texts[index])));
  };
  return { element: h("div", {}, bar, legend), show };
}

/** For what requests wait, most of them first: "Waiting for: rows 12, key share 3". */
function writtenWaits(waits) {
  const parts = waits.toSorted((one, other) => other[1] - one[1]);
  const written = parts.map(([reason, count]) => `${reason.replaceAll("_", " ")} ${whole(count)}`);
  return written.length > 0 ? `Waiting for: ${written.join(", ")}` : "";
}

function enginesTable(load) {
  const head = ["Engine", "Requests", "Waiting", "Tokens in use"].map((name) => h("th", { scope: "col" }, name));
  const valuesOf = (each) => [each.dp_rank, each.num_reqs, each.num_waiting_reqs, each.num_tokens];
  const rows = load.map((each) => h("tr", {}, valuesOf(each).map((value) => h("td", {}, whole(value)))));
  return h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
}

/** What /server_info says of memory and model, as names and values. */
function factsOf(info) {
  const model = info.model_info;
  const plan = Object.entries(model.memory_plan ?? {}).map(([name, bytes]) => [name, `${whole(bytes / 2 ** 20)} MiB`]);
  return [
    ...plan,
    ["Tokens in the KV pool", whole(model.max_total_tokens)],
    ["Tokens of a page", whole(model.page_size)],
    ["Running requests", `at most ${whole(model.max_running_requests)}`],
    ["Tokens of a request", `at most ${whole(model.max_request_tokens)}`],
    ["Model", model.model_path],
    ["Device", model.device],
    ["Weights", model.dtype],
    ["Keys and values", model.kv_dtype],
    ["Schedule", info.schedule_policy],
    ["jsg", info.version],
  ];
}

let shown = null;

export const view = {
  id: "engine",
  title: "Engine",
  async mount(root, app) {
    shown = new Engine(root, app);
    await shown.start();
  },
  unmount() {
    shown?.stop();
    shown = null;
  },
};
