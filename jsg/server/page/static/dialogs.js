// Dialogs of the whole page: the key, an error, a piece of code. The browser keeps the focus inside and takes Escape.

import { button, freshId, h } from "./dom.js";

/** Asks for the API key. Gives null when the dialog is closed without one. */
export function askKey(refused) {
  const id = freshId("key");
  const input = h("input", { id, type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const dialog = open("This server needs a key", [
    h("p", {}, refused ? "The server refused this key." : "It answers only to those who have one."),
    h("label", { for: id }, "API key"),
    input,
    h("p", { class: "hint" }, "It stays in the memory of this page and is gone when you close the page."),
    h("p", { class: "row" }, h("button", { class: "main" }, "Use this key"), closeButton("Cancel")),
  ]);
  if (refused) dialog.querySelector("p").setAttribute("role", "alert");
  return new Promise((resolve) => {
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close(input.value.trim());
    });
    dialog.addEventListener("close", () => resolve(dialog.returnValue || null));
  });
}

/** Asks before something is done that cannot be undone. */
export function confirm(title, text, action) {
  const dialog = open(title, [
    h("p", {}, text),
    h("p", { class: "row" }, h("button", { class: "main", value: "yes" }, action), closeButton("Cancel")),
  ]);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"));
  });
}

/** Shows what went wrong, in the words of the server. */
export function showError(error) {
  const text = error instanceof Error ? error.message : String(error);
  const status = error.status ? `Status ${error.status}` : null;
  open("That did not work", [
    h("p", { class: "said", role: "alert" }, text),
    status && h("p", { class: "hint" }, status, error.param ? `, field ${error.param}` : ""),
    h("p", { class: "row" }, closeButton("Close")),
  ]);
}

/**
 * Shows texts to copy, one at a time.
 * @param {string} title
 * @param {Array<[string, string]>} texts the name and the text of each
 */
export function showTexts(title, texts) {
  const shown = h("pre", { class: "code", tabindex: "0" }, texts[0][1]);
  const done = h("span", { role: "status" });
  const choose = (event) => {
    shown.textContent = texts.find(([name]) => name === event.target.value)[1];
    done.textContent = "";
  };
  const group = freshId("text");
  const choices = texts.map(([name], index) => {
    const id = freshId("choice");
    const radio = h("input", { type: "radio", name: group, id, value: name, checked: index === 0, change: choose });
    return h("span", { class: "choice" }, radio, h("label", { for: id }, name));
  });
  const copy = async () => {
    done.textContent = (await copied(shown)) ? "Copied" : "Selected; copy it with the keyboard";
  };
  open(title, [
    h("p", { class: "row" }, choices),
    shown,
    h("p", { class: "row" }, button("Copy", copy, { class: "main" }), closeButton("Close"), done),
  ]);
}

/** Copies the text of an element, or selects it where the browser gives no clipboard, as on plain HTTP. */
export async function copied(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return false;
  }
}

function closeButton(text) {
  return button(text, (event) => event.target.closest("dialog").close(""));
}

function open(title, children) {
  const id = freshId("title");
  const form = h("form", { method: "dialog" }, h("h2", { id }, title), children);
  const dialog = h("dialog", { "aria-labelledby": id, close: () => dialog.remove() }, form);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
