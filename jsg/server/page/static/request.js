// Settings and turns → the body of a request, and the same request as curl, as Python and in jsg's language.

import { GEN_NAMES, NUMBERS_IN_STEPS } from "./parameters.js"; // the server makes it of its table

export const NUMBERS = [
  ...NUMBERS_IN_STEPS,
  ["max_tokens", "Max tokens", { min: 0, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["thinking_budget", "Thinking budget", { min: 0, step: 1 }],
];

/** What a new conversation begins with. Every number is a text; an empty one leaves the field out. */
export const DEFAULTS = {
  system: "",
  ...Object.fromEntries(NUMBERS.map(([name]) => [name, ""])),
  thinking: "",
  stop: "",
  logprobs: false,
  tools: "",
  form: "",
  grammar: "",
};

/** Whether the model thinks before it answers; the chat template has the default. */
export const THINKING = [
  ["", "Default"],
  ["on", "On"],
  ["off", "Off"],
];

/** Kinds of grammars: the field of the request, and what people call it. */
export const FORMS = [
  ["", "Any text"],
  ["json_object", "Any JSON object"],
  ["json_schema", "JSON Schema"],
  ["regex", "Regular expression"],
  ["ebnf", "EBNF grammar"],
  ["choices", "One of these lines"],
];

const NUM_ALTERNATIVES = 5;
const OPENAI_FIELDS = new Set(
  (
    "model messages temperature top_p frequency_penalty presence_penalty max_tokens seed stop logprobs top_logprobs " +
    "tools response_format"
  ).split(" "),
);

/** The body of a request for the next turn after these. Raises an Error that names a box whose JSON is wrong. */
export function bodyOf(model, settings, path) {
  return { model, messages: messagesOf(settings, path), ...fieldsOf(settings) };
}

/** The smallest request that has the grammar and the tools of the settings: it generates nothing. */
export function checkBodyOf(model, settings) {
  const messages = [{ role: "user", content: "x" }];
  return { model, messages, ...grammarOf(settings), ...toolsOf(settings), max_tokens: 0 };
}

/** The turns as OpenAI's messages. */
export function messagesOf(settings, path) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return [...system, ...path.flatMap(messagesOfTurn)];
}

function messagesOfTurn(node) {
  if (node.role === "tool") {
    return node.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text }));
  }
  if (node.role === "user" && node.images.length) {
    const pictures = node.images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    return [{ role: "user", content: [...pictures, { type: "text", text: node.text }] }];
  }
  const thoughts = node.role === "assistant" && node.thoughts ? { reasoning_content: node.thoughts } : {};
  if (!node.calls?.length) return [{ role: node.role, content: node.text, ...thoughts }];
  const calls = node.calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  return [{ role: "assistant", content: node.text || null, ...thoughts, tool_calls: calls }];
}

function fieldsOf(settings) {
  const fields = { return_drafts: true };
  for (const [name] of NUMBERS) if (settings[name] !== "") fields[name] = Number(settings[name]);
  if (settings.thinking !== "") fields.enable_thinking = settings.thinking === "on";
  const stops = settings.stop.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  if (settings.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  const grammar = grammarOf(settings);
  if (Object.keys(grammar).length) Object.assign(fields, grammar, { return_constraint: true });
  return { ...fields, ...toolsOf(settings) };
}

function grammarOf({ form, grammar }) {
  if (form === "json_object") return { response_format: { type: "json_object" } };
  if (form === "" || grammar.trim() === "") return {};
  if (form === "json_schema") return { json_schema: parsed("JSON Schema", grammar) };
  if (form === "choices") return { choices: grammar.split("\n").filter((line) => line !== "") };
  return { [form]: form === "regex" ? grammar.trim() : grammar };
}

function toolsOf({ tools }) {
  return tools.trim() === "" ? {} : { tools: parsed("tools", tools) };
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The box of the ${name} must be JSON, but: ${error.message}`);
  }
}

/** The request as curl. */
export function asCurl(url, body, hasKey) {
  const key = hasKey ? ' \\\n  -H "Authorization: Bearer $JSG_API_KEY"' : "";
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${url}v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${data}'\n`;
}

/** The request in Python with OpenAI's package. Fields that it does not know are in `extra_body`. */
export function asPython(url, body, hasKey) {
  const own = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), 1)},`);
  const key = hasKey ? 'os.environ["JSG_API_KEY"]' : '"none"';
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${url}v1", api_key=${key})
answer = client.chat.completions.create(
${lines.join("\n")}
)
print(answer.choices[0].message.content)
`;
}

const GEN_FIELDS = [...GEN_NAMES, "choices"];
const LANG_TOOLS =
  "# Tools belong to /v1/chat/completions; a program chooses with sgl.select, or calls functions of Python.\n";
const LANG_THINKING =
  "# Whether the model thinks is said to /v1/chat/completions; sgl.separate_reasoning tells thoughts from answers.\n";

/** The request as a program of jsg.lang. It says in a comment what a program writes in another way. */
export function asLang(url, body, hasKey) {
  const fields = { ...body };
  if (body.response_format) fields.json_schema = { type: "object", additionalProperties: true };
  const names = GEN_FIELDS.filter((name) => fields[name] !== undefined);
  const given = names.map((name) => `, ${name}=${literal(fields[name], 2)}`);
  const turns = body.messages.map(langTurn);
  const key = hasKey ? ', api_key=os.environ["JSG_API_KEY"]' : "";
  const thinks = body.enable_thinking !== undefined || body.thinking_budget !== undefined;
  const notes = (body.tools ? LANG_TOOLS : "") + (thinks ? LANG_THINKING : "");
  return `${hasKey ? "import os\n\n" : ""}import jsg as sgl

sgl.set_default_backend(sgl.RuntimeEndpoint("${url.replace(/\/$/, "")}"${key}))

${notes}
@sgl.function
def chat(s):
${turns.join("\n")}
    s += sgl.assistant(sgl.gen("answer"${given.join("")}))


print(chat.run()["answer"])
`;
}

function langTurn({ role, content, tool_calls: calls }) {
  if (Array.isArray(content)) {
    const parts = content.map((part) => (part.type === "text" ? literal(part.text, 2) : 'sgl.image("picture.png")'));
    return `    s += sgl.user(${parts.join(" + ")})`;
  }
  const text = calls ? JSON.stringify(calls.map((call) => call.function)) : content;
  return `    s += sgl.${role === "tool" ? "user" : role}(${literal(text, 2)})`;
}

/** A value of JSON as Python writes it. JSON's escapes in texts are Python's too. */
function literal(value, depth) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = "    ".repeat(depth + 1);
  const items = Array.isArray(value)
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const flat = `${open}${items.join(", ")}${close}`;
  if (flat.length < 90 && !flat.includes("\n")) return flat;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
