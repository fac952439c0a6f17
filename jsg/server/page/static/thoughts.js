// The thoughts of the model above its answer: open until the answer begins, and then as the reader wants them.

import { h } from "./dom.js";

const wanted = new WeakMap(); // node → whether its reader has opened its thoughts or closed them

/** The block of an answer's thoughts, and the function that draws it again. It stays, and the focus stays in it. */
export function makeThoughts(node) {
  const label = h("summary", { click: () => wanted.set(node, !element.open) });
  const text = h("div", {});
  const element = h("details", { class: "thoughts" }, label, text);

  function draw(running) {
    element.hidden = !node.thoughts;
    element.open = wanted.get(node) ?? !hasAnswer(node);
    text.className = running && !hasAnswer(node) ? "thought growing" : "thought";
    show(label, labelOf(node, running));
    show(text, node.thoughts ?? "");
  }

  return { element, draw };
}

function hasAnswer(node) {
  return node.text !== "" || node.calls?.length > 0;
}

function labelOf(node, running) {
  if (running) return hasAnswer(node) ? "Thoughts" : "Thinking";
  const count = node.usage?.completion_tokens_details?.reasoning_tokens;
  return count === undefined ? "Thoughts" : `Thoughts, ${count} tokens`;
}

/** Leaves a text that has not changed, in which the reader may have selected something. */
function show(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
