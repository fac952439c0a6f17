// One turn of a conversation: its thoughts, text, pictures and calls of tools, and what can be done with it.

import { factsOf } from "./answer.js";
import { button, freshId, h, replace } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { asCurl, asLang, asPython } from "./request.js";
import { makeThoughts } from "./thoughts.js";
import { tokenRow } from "./tokens.js";
import { addTurn, chooseSibling, placeOf } from "./tree.js";

const NAMES = { user: "You", assistant: "Model", tool: "Results of tools" };

/** The element of a turn, and the function that draws it again after a change. */
export function makeTurn(chat, node) {
  const element = h("li", { class: `turn ${node.role}` });
  const thoughts = node.role === "assistant" ? makeThoughts(node) : null;
  const prose = h("div", {}); // it stays while an answer grows
  const body = h("div", { class: "body" });
  const footer = h("div", { class: "footer" });
  const draw = () => {
    const running = chat.session.running.has(node);
    element.setAttribute("aria-busy", String(running));
    thoughts?.draw(running);
    replace(body, contentOf(chat, node, running, prose));
    replace(footer, running ? null : footerOf(chat, node, edit));
  };
  const edit = () => {
    replace(body, editor(chat, node, draw));
    replace(footer);
    body.querySelector("textarea").focus();
  };
  replace(element, h("h2", { class: "who" }, NAMES[node.role]), thoughts?.element, body, footer);
  draw();
  return { element, draw };
}

function contentOf(chat, node, running, prose) {
  const scored = !running && node.tokens?.length && !node.calls?.length;
  const waits = !running && node.calls?.length > 0 && node.children.length === 0;
  const begins = running && !node.thoughts;
  return [
    pictures(node.images),
    scored ? tokenRow(node) : (node.text || begins) && textOf(node, running, prose),
    node.calls?.map((call) => h("pre", { class: "code call", tabindex: "0" }, `${call.name}(${call.arguments})`)),
    waits && resultsForm(chat, node),
    node.results?.map(({ text }) => h("pre", { class: "code", tabindex: "0" }, text)),
    node.stopped && h("p", { class: "hint" }, "Stopped."),
    node.interrupted && h("p", { class: "hint" }, "Interrupted: the page was left before the answer was complete."),
    node.error && h("p", { class: "said" }, node.error),
    node.warnings && h("p", { class: "hint warned" }, `The server says: ${node.warnings}`),
  ];
}

/** What the model writes is read as Markdown; what people write stays as they wrote it. */
function textOf(node, running, prose) {
  if (node.role !== "assistant") return h("div", { class: "text" }, node.text);
  prose.className = running ? "text prose growing" : "text prose";
  showMarkdown(prose, node.text);
  return prose;
}

function pictures(images) {
  if (!images?.length) return null;
  return h("div", { class: "pictures" }, images.map(({ url, name }) => h("img", { src: url, alt: name, title: name })));
}

function footerOf(chat, node, edit) {
  const facts = node.role === "assistant" ? factsOf(node).map((fact) => h("li", {}, fact)) : [];
  return [
    facts.length > 0 && h("ul", { class: "facts" }, facts),
    h("div", { class: "row actions" }, versions(chat, node), actionsOf(chat, node, edit)),
  ];
}

function actionsOf(chat, node, edit) {
  const ask = () => chat.answer(node.id);
  const answer = node.children.length === 0 && button("Ask again", ask, { title: "Send this turn once more" });
  if (node.role === "tool") return [answer];
  const texts = [["Text", node.text], ...(node.thoughts ? [["Thoughts", node.thoughts]] : [])];
  const show = () => chat.app.showTexts("Copy", texts);
  const copy = button("Copy", show, { "aria-label": "Copy the text" });
  const change = button("Edit", edit, { title: "Write another version of this turn" });
  if (node.role === "user") return [answer, change, copy];
  const again = button("Again", () => chat.answer(node.parent), { title: "Let the model write another answer" });
  const code = button("Code", () => showCode(chat, node), { title: "This request as curl and as Python" });
  return [again, change, copy, code];
}

/** `‹ 2 / 3 ›` for a turn of which there are several versions. */
function versions(chat, node) {
  const { number, count } = placeOf(chat.conversation, node);
  if (count < 2) return null;
  const go = (step, name) => () => {
    const id = chooseSibling(chat.conversation, node, step);
    chat.draw();
    const turn = chat.list.querySelector(`[data-versions="${id}"] [aria-label="${name}"]`);
    turn?.focus();
    chat.app.announce(`Version ${placeOf(chat.conversation, chat.conversation.nodes[id]).number} of ${count}`);
  };
  const step = (sign, by, name) => button(sign, go(by, name), { "aria-label": name });
  return h(
    "span",
    { class: "versions", role: "group", "aria-label": "Versions", "data-versions": node.id },
    step("‹", -1, "Previous version"),
    h("span", {}, `${number} / ${count}`),
    step("›", 1, "Next version"),
  );
}

/** Another version of a turn: one of the user is answered, one of the model is taken as it is. */
function editor(chat, node, cancel) {
  const id = freshId("edit");
  const text = h("textarea", { id, rows: Math.min(12, node.text.split("\n").length + 1), value: node.text });
  const save = () => {
    if (node.role === "user") {
      chat.send({ text: text.value, images: node.images }, node.parent);
      return;
    }
    addTurn(chat.conversation, node.parent, { role: "assistant", text: text.value });
    chat.session.keep(chat.conversation);
    chat.draw();
  };
  const word = node.role === "user" ? "Send" : "Keep";
  return [
    h("label", { class: "unseen", for: id }, "Another version of this turn"),
    text,
    h("div", { class: "row" }, button(word, save, { class: "main" }), button("Cancel", cancel)),
  ];
}

/** Boxes for what the called tools gave, of which a turn is made. */
function resultsForm(chat, node) {
  const boxes = node.calls.map((call) => {
    const id = freshId("result");
    const box = h("textarea", { id, rows: 2 });
    return { call, box, row: [h("label", { for: id }, `Result of ${call.name}`), box] };
  });
  const send = () => {
    const results = boxes.map(({ call, box }) => ({ id: call.id, text: box.value }));
    const turn = addTurn(chat.conversation, node.id, { role: "tool", results });
    chat.answer(turn.id);
  };
  const main = button("Send the results", send, { class: "main" });
  return h("div", { class: "results" }, boxes.map(({ row }) => row), main);
}

/** The request of an answer as curl, in Python and in the language of jsg. */
function showCode(chat, node) {
  const { app } = chat;
  try {
    const [url, body] = [new URL("./", document.baseURI).href, chat.bodyFor(node.parent)];
    const write = (how) => how(url, body, app.hasKey);
    app.showTexts("This request", [["curl", write(asCurl)], ["Python", write(asPython)], ["jsg.lang", write(asLang)]]);
  } catch (error) {
    app.showError(error);
  }
}
