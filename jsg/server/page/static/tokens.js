// The tokens of an answer, coloured by their probability, with what else the model considered.

import { freshId, h, replace } from "./dom.js";

const BOUNDS = [0.9, 0.6, 0.3, 0.1]; // classes p0 (likely) to p4 (unlikely)
const PUSHED = 0.5; // the grammar left less of the model's probability than this
const HINT = "Point at a token, or move to it with the arrow keys.";

/**
 * The tokens of a node as a row of which one is reached by Tab, and the others by the arrow keys.
 * `kept_mass` of the grammar's report has, for each token, the probability of all tokens that the grammar allowed, and
 * `is_forced` whether jump-forward wrote it; such tokens are shaded. Both begin with the tokens of the thoughts.
 */
export function tokenRow(node) {
  const id = freshId("alternatives");
  const panel = h("div", { class: "alternatives", id, "aria-live": "polite" }, HINT);
  const kept = (node.constraint?.kept_mass ?? []).slice(-node.tokens.length);
  const forced = (node.constraint?.is_forced ?? []).slice(-node.tokens.length);
  const spans = node.tokens.map((token, index) => tokenSpan(token, kept[index], forced[index], id));
  if (node.has_end) spans.pop();
  if (spans.length) spans[0].tabIndex = 0;
  const show = (event) => {
    const index = spans.indexOf(event.target);
    if (index >= 0) replace(panel, alternatives(node.tokens[index], kept[index], forced[index]));
  };
  const row = h(
    "div",
    {
      class: "tokens",
      role: "group",
      "aria-label": "Tokens",
      focusin: show,
      mouseover: show,
      keydown: (event) => move(event, spans),
    },
    spans,
  );
  return h("div", { class: "scored" }, row, panel);
}

function tokenSpan(token, kept, isForced, panelId) {
  const level = BOUNDS.filter((bound) => Math.exp(token.logprob) < bound).length;
  const pushed = kept !== undefined && kept < PUSHED ? " pushed" : "";
  const written = isForced ? " forced" : "";
  const name = token.text.trim() === "" ? visible(token.text) : null; // a button needs a name that can be read aloud
  const read = { role: "button", tabindex: "-1", "aria-label": name, "aria-describedby": panelId };
  return h("span", { class: `token p${level}${pushed}${written}`, ...read }, token.text);
}

function move(event, spans) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
  const from = spans.indexOf(event.target);
  if (step === undefined || from < 0) return;
  event.preventDefault();
  const to = Math.min(Math.max(from + step, 0), spans.length - 1);
  spans[from].tabIndex = -1;
  spans[to].tabIndex = 0;
  spans[to].focus();
}

function alternatives(token, kept, isForced) {
  const others = token.top.some((other) => other.text === token.text) ? token.top : [...token.top, token];
  const rows = others.map((other) =>
    h(
      "li",
      { class: other.text === token.text ? "taken" : null },
      h("code", {}, visible(other.text)),
      bar(Math.exp(other.logprob)),
      h("span", {}, percent(Math.exp(other.logprob))),
    ),
  );
  const said = kept === undefined ? null : `The grammar allowed ${percent(kept)} of what the model expected.`;
  const written = isForced ? "The grammar left one text here, and jump-forward wrote it." : null;
  return [h("ul", {}, rows), said && h("p", {}, said), written && h("p", {}, written)];
}

function bar(share) {
  const filled = h("span", {});
  filled.style.setProperty("width", `${100 * share}%`);
  return h("span", { class: "share", "aria-hidden": "true" }, filled);
}

/** Shows spaces and line breaks, of which a token may consist. */
function visible(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

function percent(share) {
  return share >= 0.001 || share === 0 ? `${(100 * share).toFixed(1)} %` : "< 0.1 %";
}
