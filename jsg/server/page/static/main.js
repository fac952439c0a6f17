// The frame of the page: tabs, the state of the server, and what views get as `app`.

import { Api } from "./api.js";
import { askKey, confirm, showError, showTexts } from "./dialogs.js";
import { button, h, replace } from "./dom.js";
import { VIEWS } from "./views.js";

const READY_POLL_MS = 1500;

const api = new Api(askKey);
const root = document.getElementById("view");
const live = document.getElementById("live");
const state = document.getElementById("state");
let shown = null;

/**
 * What a view may use. A view is `{id, title, mount(root, app), unmount()}`: `mount` fills an empty root when its tab
 * is chosen, and `unmount` stops timers and streams when another tab is chosen.
 */
const app = {
  fetchJson: (path, options) => api.fetchJson(path, options),
  fetchText: (path, options) => api.fetchText(path, options),
  stream: (path, options) => api.stream(path, options),
  showError,
  showTexts,
  confirm,
  /** Tells a screen reader what has happened. */
  announce(text) {
    live.textContent = text;
  },
  /** The served model, as /v1/models describes it, once the server is ready. */
  model: null,
  /** Whether calls of the server need a key, so that examples show where it goes. */
  get hasKey() {
    return api.hasKey;
  },
};

function makeTabs() {
  const tabs = VIEWS.map((view) =>
    button(view.title, (event) => choose(view, event), {
      role: "tab",
      id: `tab-${view.id}`,
      "aria-controls": "view",
      keydown: (event) => moveFocus(event, tabs),
    }),
  );
  replace(document.getElementById("tabs"), tabs);
}

/** The arrow keys go from tab to tab, as in every list of tabs. */
function moveFocus(event, tabs) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const next = (tabs.indexOf(event.target) + step + tabs.length) % tabs.length;
  tabs[next].focus();
  tabs[next].click();
}

/** A tab was chosen, by a pointer or by a key: a pointer leaves the focus to the view. */
function choose(view, event) {
  if (view !== shown) history.pushState(null, "", `#${view.id}`);
  if (event.detail > 0) event.currentTarget.blur();
  show(view);
}

/** The view that the address names; undefined where it names none. */
function addressed() {
  return VIEWS.find((view) => `#${view.id}` === location.hash);
}

/** The address has changed, by Back, Forward or by hand. Other names in it, such as that of `main`, change no view. */
function followAddress() {
  const view = addressed();
  if (view) show(view);
}

function show(view) {
  if (view === shown) return;
  shown?.unmount();
  shown = view;
  for (const other of VIEWS) {
    const tab = document.getElementById(`tab-${other.id}`);
    tab.setAttribute("aria-selected", String(other === view));
    tab.tabIndex = other === view ? 0 : -1;
  }
  root.setAttribute("aria-labelledby", `tab-${view.id}`);
  root.className = `view-${view.id}`;
  replace(root);
  Promise.resolve(view.mount(root, app)).catch(showError);
}

/** Waits until the server is ready, which takes as long as its model loads, and learns what it serves. */
async function greet() {
  while (!(await isReady())) await new Promise((resolve) => setTimeout(resolve, READY_POLL_MS));
  try {
    const { data } = await api.fetchJson("v1/models");
    app.model = data[0];
    setState("ok", app.model.id);
    document.title = `${app.model.id} · jsg`;
    document.dispatchEvent(new CustomEvent("jsg-model"));
  } catch (error) {
    setState("bad", error.status === 401 ? button("Give a key", greet) : error.message);
  }
}

async function isReady() {
  try {
    const response = await fetch(new URL("ready", document.baseURI), { cache: "no-store" });
    if (response.ok) return true;
    setState("wait", (await response.json()).status ?? "loading");
  } catch {
    setState("bad", "not reachable");
  }
  return false;
}

function setState(kind, text) {
  replace(state, h("span", { class: `dot ${kind}`, "aria-hidden": "true" }), text);
}

// A file that is dropped beside the place for it would otherwise be opened in the place of the page.
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());

makeTabs();
addEventListener("popstate", followAddress);
if (!addressed()) history.replaceState(null, "", `#${VIEWS[0].id}`);
followAddress();
greet();
