/** The page: loads files that `make_page.py` wrote, and shows answers. */

import { load } from "@jsg/grammar";
import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-web";
import { Model, generate, measure } from "./generate.js";

const MAX_TOKENS = 64;
const CACHE = [4, 2, 2, 0, 32];
const find = (id) => document.getElementById(id);
const bytes = async (name) => {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} gave the status ${response.status}`);
  return new Uint8Array(await response.arrayBuffer());
};
const json = async (name) => JSON.parse(new TextDecoder().decode(await bytes(name)));

window.onerror = (message) => (find("status").textContent = message); // of what is loaded below
ort.env.wasm.numThreads = 1;
const [model, tokenizer, tables, vocabulary] = await Promise.all([
  bytes("model.onnx").then((file) => Model.load(ort, file, CACHE)),
  Promise.all([json("tokenizer.json"), json("tokenizer_config.json")]).then((files) => new Tokenizer(...files)),
  bytes("record.grammar"),
  bytes("tiny.vocabulary"),
]);
const began = performance.now();
const grammar = await load(tables, vocabulary);
grammar.matcher().mask();
const status = `The grammar was ready after ${(performance.now() - began).toFixed(1)} ms.`;

const encode = (text) => tokenizer.encode(text, { add_special_tokens: false }).ids;
const { eosIds } = grammar.vocabulary;
const prompt = () => encode(`<|user|>${find("prompt").value} Extract name, age and city as JSON.<|end|><|assistant|>`);

async function show(id, options) {
  const begin = performance.now();
  const { tokens, numRuns } = await generate(model, prompt(), { eosIds, maxTokens: MAX_TOKENS, ...options });
  const ms = performance.now() - begin;
  find(id).textContent = tokenizer.decode(tokens);
  const row = find("counts").insertRow();
  for (const cell of [id, tokens.length, numRuns, ms.toFixed(0)]) row.insertCell().textContent = cell;
  return tokens;
}

/** Does something while no button can be pressed, and says how it ended. */
async function busy(work) {
  for (const button of document.querySelectorAll("button")) button.disabled = true;
  find("status").textContent = "Computing…";
  find("status").textContent = await work().catch(String);
  for (const button of document.querySelectorAll("button")) button.disabled = false;
}

find("generate").onclick = () =>
  busy(async () => {
    find("counts").replaceChildren();
    await show("plain", {});
    await show("constrained", { matcher: grammar.matcher() });
    await show("jumping", { matcher: grammar.matcher(), encode });
    return "Done.";
  });

find("measure").onclick = () =>
  busy(async () => {
    find("counts").replaceChildren();
    const tokens = await show("constrained", { matcher: grammar.matcher() });
    const found = await measure(model, prompt(), tokens, () => grammar.matcher());
    const ratio = (found.with / found.without).toFixed(3);
    return `A token takes ${found.without.toFixed(3)} ms, and ${found.with.toFixed(3)} with the grammar: ${ratio} ×.`;
  });

await busy(async () => status);
/** For tests: the logits after tokens. */
window.logitsOf = async (tokens) => {
  model.rewind(0);
  return Array.from((await model.run(tokens)).data);
};
