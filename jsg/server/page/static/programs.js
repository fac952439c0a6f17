// The view of programs: a compiled example is sent whole, and its graph and its calls are shown as they run.

import { button, h, replace, svg } from "./dom.js";
import { layout } from "./graph.js";

const CARD = { width: 176, gapX: 28, gapY: 22 };
const HEIGHTS = { generate: 78, choose: 78, text: 46 };
const LEAST_HEIGHT = 28;
const TICK_MS = 100;

let run = null; // {abort, calls, begun, timer}: the program that is under way
let parts = null; // the elements of the view
let offered = [];

export const view = {
  id: "programs",
  title: "Programs",
  async mount(root, app) {
    parts = build(root, app);
    offered = await app.fetchJson("page/programs.json");
    if (!parts) return; // another tab was chosen meanwhile
    replace(parts.choice, offered.map((program, index) => h("option", { value: index }, program.title)));
    choose(0);
  },
  unmount() {
    stop();
    parts = null;
  },
};

function build(root, app) {
  const made = {
    choice: h("select", { id: "program", change: () => choose(Number(made.choice.value)) }),
    about: h("p", { class: "hint" }),
    fields: h("div", { class: "fields" }),
    begin: h("button", { type: "submit", class: "main", disabled: true }, "Run"),
    end: button("Stop", stop, { disabled: true }),
    graph: h("div", { class: "graph", role: "group", "aria-label": "Graph of the program", tabindex: 0 }),
    calls: h("table", { class: "call-table" }),
    status: h("p", { class: "hint" }),
    result: h("pre", { class: "code", role: "group", tabindex: 0, "aria-label": "Variables of the program" }),
    cards: new Map(),
  };
  const submit = (event) => {
    event.preventDefault();
    start(app).catch(app.showError);
  };
  made.form = h(
    "form",
    { submit },
    h("label", { for: "program" }, "Program"),
    made.choice,
    made.about,
    made.fields,
    h("div", { class: "row" }, made.begin, made.end),
    made.status,
  );
  const shown = [made.graph, h("h2", {}, "Calls"), made.calls, h("h2", {}, "Variables"), made.result];
  replace(root, made.form, h("div", { class: "shown" }, shown));
  return made;
}

function choose(index) {
  const program = offered[index];
  stop();
  parts.begin.disabled = false;
  parts.about.textContent = program.about;
  replace(parts.fields, program.graph.arguments.map(({ name }) => field(name, program.arguments[name])));
  draw(program.graph);
  showCalls([]);
  parts.status.textContent = "";
  parts.result.textContent = "";
}

function field(name, value = "") {
  const id = `argument-${name}`;
  return [h("label", { for: id }, name), h("textarea", { id, name, rows: 2, value })];
}

function draw(graph) {
  const { cards, edges, columns, rows } = layout(graph);
  const heightOf = (card) => HEIGHTS[card.kind] ?? LEAST_HEIGHT;
  const tops = [0];
  for (let row = 0; row < rows; row += 1) {
    const tallest = Math.max(...cards.filter((card) => card.row === row).map(heightOf));
    tops.push(tops[row] + tallest + CARD.gapY);
  }
  const x = (card) => card.column * (CARD.width + CARD.gapX);
  const y = (card) => tops[card.row];
  const width = columns * (CARD.width + CARD.gapX);
  const height = tops[rows];
  const lines = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const [from, to] of edges) {
    const [x1, y1] = [x(from) + CARD.width / 2, y(from) + heightOf(from)];
    const [x2, y2] = [x(to) + CARD.width / 2, y(to)];
    const bend = Math.min(CARD.gapY, (y2 - y1) / 2);
    lines.append(svg("path", { d: `M${x1} ${y1} C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}` }));
  }
  const placeOf = (card) => ({ left: x(card), top: y(card), width: CARD.width, height: heightOf(card) });
  const boxes = cards.map((card) => box(card, placeOf(card)));
  const inner = h("div", { class: "inner" }, lines, boxes.map((each) => each.whole));
  inner.style.width = `${width}px`;
  inner.style.height = `${height}px`;
  parts.cards = new Map(cards.map((card, index) => [card.id, boxes[index]]));
  replace(parts.graph, inner);
}

/** A card of the graph; `state` is where the run shows what has become of it. */
function box(card, place) {
  const text = card.text.trim();
  const state = h("span", { class: "became" });
  const title = card.tag ? `${card.title} (${card.tag})` : card.title;
  const whole = h("div", { class: `card ${card.kind}`, title: text }, h("b", {}, title), h("span", {}, text), state);
  for (const [name, value] of Object.entries(place)) {
    whole.style[name] = `${value}px`;
  }
  return { whole, state };
}

async function start(app) {
  const { graph } = offered[Number(parts.choice.value)];
  const values = new FormData(parts.form);
  const given = Object.fromEntries(graph.arguments.map(({ name }) => [name, values.get(name)]));
  const body = { graph, arguments: given, stream: true };
  draw(graph);
  parts.result.textContent = "";
  const abort = new AbortController();
  const own = { abort, calls: [], begun: performance.now(), timer: setInterval(show, TICK_MS) };
  run = own;
  setBusy(true);
  tell(app, "running");
  try {
    for await (const { data } of app.stream("v1/programs", { body, signal: abort.signal })) {
      const event = JSON.parse(data);
      if (event.call) own.calls[event.index] = event.call;
      if (event.result) finish(app, event.result, own);
    }
  } catch (error) {
    tell(app, abort.signal.aborted ? "stopped" : "failed");
    if (!abort.signal.aborted) throw error;
  } finally {
    clearInterval(own.timer);
    if (run === own) run = null;
    if (parts && run === null) setBusy(false);
  }
}

function tell(app, text) {
  if (!parts) return;
  parts.status.textContent = text;
  app.announce(`Program: ${text}`);
}

function finish(app, result, own) {
  if (run !== own || !parts) return;
  own.calls = result.timeline;
  show();
  const { calls, prompt_tokens: prompt, cached_tokens: cached, completion_tokens: made } = result.usage;
  const errors = result.errors.length ? `, ${result.errors.length} errors` : "";
  tell(app, `done: ${calls} calls, ${cached} of ${prompt} prompt tokens cached, ${made} generated${errors}`);
  const shown = { ...result.variables };
  if (result.return_value !== null) shown["(returned)"] = result.return_value;
  if (result.errors.length) shown["(errors)"] = result.errors;
  parts.result.textContent = JSON.stringify(shown, null, 2);
}

function stop() {
  run?.abort.abort();
}

function setBusy(isBusy) {
  parts.begin.disabled = isBusy;
  parts.choice.disabled = isBusy;
  parts.end.disabled = !isBusy;
}

/** Shows what is known of the calls now, in the graph and in the table. */
function show() {
  if (!run || !parts) return;
  const calls = run.calls.filter(Boolean);
  for (const [id, card] of parts.cards) {
    const own = calls.filter((call) => call.node === id);
    if (own.length) showState(card, own);
  }
  showCalls(calls, (performance.now() - run.begun) / 1000);
}

function showState(card, calls) {
  const last = calls[calls.length - 1];
  const state = stateOf(last);
  card.whole.dataset.state = state;
  const times = calls.length > 1 ? `${calls.length}× ` : "";
  const said = state === "done" ? `${tokens(last)}, ${seconds(last)}` : (last.error ?? state);
  card.state.textContent = times + said;
}

function showCalls(calls, now = 0) {
  const end = Math.max(1e-3, ...calls.map((call) => call.end_s ?? now));
  const names = ["call", "time", "cached / prompt", "generated", "s"];
  const head = h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)));
  replace(parts.calls, h("thead", {}, head), h("tbody", {}, calls.map((call) => row(call, end, now))));
}

function row(call, end, now) {
  const bar = h("i", { class: stateOf(call) });
  bar.style.left = `${(100 * call.start_s) / end}%`;
  bar.style.width = `${(100 * ((call.end_s ?? now) - call.start_s)) / end}%`;
  const shared = `${known(call.cached_tokens)} / ${known(call.prompt_tokens)}`;
  const cells = [shared, known(call.completion_tokens), seconds(call)];
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, `${call.name ?? "text"} (${call.kind})`),
    h("td", {}, h("div", { class: "lane" }, bar)),
    cells.map((cell) => h("td", { class: "number" }, cell)),
  );
}

function stateOf(call) {
  if (call.error) return "failed";
  return call.end_s === null ? "running" : "done";
}

function known(count) {
  return count ?? "–";
}

function tokens(call) {
  return `${known(call.cached_tokens)} / ${known(call.prompt_tokens)} cached, ${known(call.completion_tokens)} new`;
}

function seconds(call) {
  if (call.error) return call.error;
  return call.end_s === null ? "…" : `${(call.end_s - call.start_s).toFixed(3)} s`;
}
