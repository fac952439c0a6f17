// The settings of a conversation: system prompt, sampling, thoughts, tools, and the form of answers with what the
// server says of it.

import { freshId, h, replace } from "./dom.js";
import { FORMS, NUMBERS, THINKING, checkBodyOf } from "./request.js";

const CHECK_DELAY_MS = 500;
const HINTS = {
  json_schema: '{"type": "object", "properties": {"city": {"type": "string"}}}',
  regex: "(yes|no), because [a-z ]+\\.",
  ebnf: 'root ::= "yes" | "no"',
  choices: "Paris\nRome",
};
const TOOLS_HINT =
  '[{"type": "function", "function": {"name": "weather", "parameters": ' +
  '{"type": "object", "properties": {"city": {"type": "string"}}}}}]';
/** What holds for the numbers that have no default. */
const WITHOUT = { seed: "any", thinking_budget: "no limit" };
const CODE = { class: "mono", spellcheck: "false" };

/** The panel, and the function that shows the settings of the present conversation. */
export function makeSettings(chat) {
  const controls = new Map(); // name of a setting → its element
  const result = h("p", { class: "result", role: "status" });
  let timer = null;
  let asked = null;

  function draw() {
    const { app } = chat;
    for (const [name] of NUMBERS) controls.get(name).placeholder = placeholderOf(app.model, name);
    for (const [name, control] of controls) {
      const value = chat.conversation.settings[name];
      if (control.type === "checkbox") control.checked = value;
      else control.value = value;
    }
    drawGrammar();
    replace(result);
  }

  function drawGrammar() {
    const { form } = chat.conversation.settings;
    const box = controls.get("grammar");
    box.parentElement.hidden = !(form in HINTS);
    box.placeholder = HINTS[form] ?? "";
  }

  function changed(name, needsCheck) {
    const control = controls.get(name);
    chat.conversation.settings[name] = control.type === "checkbox" ? control.checked : control.value;
    chat.keepSettings();
    if (name === "form") drawGrammar();
    if (needsCheck) checkSoon();
  }

  function checkSoon() {
    clearTimeout(timer);
    asked?.abort();
    replace(result);
    timer = setTimeout(check, CHECK_DELAY_MS);
  }

  /** Asks the server for no tokens in this form: it compiles the grammar and reads the tools, or says what is wrong. */
  async function check() {
    const { settings } = chat.conversation;
    if (settings.form === "" && settings.tools.trim() === "") return;
    asked = new AbortController();
    const { signal } = asked;
    const begun = performance.now();
    try {
      await chat.app.fetchJson("v1/chat/completions", { body: checkBodyOf(chat.app.model?.id, settings), signal });
      show("good", `The server takes it; compiled in ${Math.round(performance.now() - begun)} ms.`);
    } catch (error) {
      if (!signal.aborted) show("bad", error.message);
    }
  }

  function show(kind, text) {
    result.className = `result ${kind}`;
    result.textContent = text;
  }

  function field(name, label, tag, props, needsCheck = false) {
    const id = freshId(name);
    const control = h(tag, { id, input: () => changed(name, needsCheck), ...props });
    controls.set(name, control);
    return h("div", { class: "field" }, h("label", { for: id }, label), control);
  }

  const element = h(
    "aside",
    { class: "settings", id: "settings", "aria-label": "Settings" },
    h("h2", {}, "Settings"),
    field("system", "System prompt", "textarea", { rows: 3 }),
    h("div", { class: "numbers" }, NUMBERS.map(numberField)),
    choice("thinking", "Thinking", THINKING),
    field("stop", "Stop texts, one on each line", "textarea", { rows: 1 }),
    h("div", { class: "check" }, checkbox("logprobs", "Colour tokens by their probability")),
    h("h2", {}, "Form of the answer"),
    choice("form", "Answers are", FORMS, true),
    field("grammar", "Grammar", "textarea", { rows: 5, ...CODE }, true),
    field("tools", "Tools, as JSON", "textarea", { rows: 3, placeholder: TOOLS_HINT, ...CODE }, true),
    result,
  );

  function numberField([name, label, bounds]) {
    return field(name, label, "input", { type: "number", step: "any", ...bounds });
  }

  function checkbox(name, label) {
    const id = freshId(name);
    const control = h("input", { type: "checkbox", id, change: () => changed(name, false) });
    controls.set(name, control);
    return [control, h("label", { for: id }, label)];
  }

  function choice(name, label, options, needsCheck = false) {
    const row = field(name, label, "select", {}, needsCheck);
    replace(controls.get(name), options.map(([value, text]) => h("option", { value }, text)));
    return row;
  }

  return { element, draw };
}

/** What holds where a number is left empty, as the server says of its model. */
function placeholderOf(model, name) {
  if (model === null) return "";
  if (name === "max_tokens") return `up to ${model.context_length}`;
  const number = model.default_parameters?.[name];
  return number === undefined ? WITHOUT[name] : String(number);
}
