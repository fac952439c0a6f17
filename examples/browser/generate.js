/** A model of `onnx_model.py` in a browser, and answers of it with and without a grammar. */

import { forbid } from "./transformers.js";

/** The model, with the keys and values of the tokens that it has read. */
export class Model {
  #ort;
  #session;
  #cache;
  #past;
  /** How many tokens it has read. */
  length = 0;

  /** @param ort the module onnxruntime-web @param {Uint8Array} file @param {number[]} cache L, 2, K, 0, H */
  static async load(ort, file, cache) {
    return new Model(ort, await ort.InferenceSession.create(file, { executionProviders: ["wasm"] }), cache);
  }

  constructor(ort, session, cache) {
    this.#ort = ort;
    this.#session = session;
    this.#cache = cache;
    this.rewind(0);
  }

  /** Reads tokens. Gives the logits after each of them, one row behind the other. @param {number[]} tokens */
  async run(tokens) {
    const whole = (values) => new this.#ort.Tensor("int64", BigInt64Array.from(values, BigInt), [values.length]);
    const given = { tokens: whole(tokens), past: this.#past, kept: whole([this.length]) };
    const { logits, present } = await this.#session.run(given);
    this.#past = present;
    this.length += tokens.length;
    return logits;
  }

  /** Forgets the last tokens, so that it has read so many. @param {number} length */
  rewind(length) {
    if (!length) this.#past = new this.#ort.Tensor("float32", new Float32Array(0), this.#cache);
    this.length = length;
  }
}

/** The likeliest token of a row of logits, of those that a mask allows. */
export function choose(logits, row, mask) {
  const size = logits.dims[1];
  const scores = logits.data.subarray(row * size, (row + 1) * size);
  if (mask) forbid(scores, mask);
  let best = 0;
  for (let token = 1; token < size; token++) if (scores[token] > scores[best]) best = token;
  return best;
}

/**
 * Answers a prompt with the likeliest tokens.
 *
 * With `encode`, the text that the grammar forces is read as drafts in one run of the model, which keeps those that it
 * chooses itself. So the answer is the same, in fewer runs.
 * @param {Model} model
 * @param {number[]} prompt
 * @param {{eosIds: Set<number>, maxTokens: number, matcher?: object, encode?: (text: string) => number[]}} options
 */
export async function generate(model, prompt, { eosIds, maxTokens, matcher, encode }) {
  model.rewind(0);
  const tokens = [];
  let pending = prompt;
  for (let numRuns = 1; ; numRuns++) {
    // The last token of a forced text might be another one, which goes on with the text after it.
    const drafts = matcher && encode ? encode(matcher.forced()).slice(0, -1) : [];
    const logits = await model.run([...pending, ...drafts]);
    for (let i = 0; ; i++) {
      const token = choose(logits, pending.length - 1 + i, matcher?.mask());
      if (matcher && !matcher.accept(token)) throw new Error("a mask must allow only what can be accepted");
      if (!eosIds.has(token)) tokens.push(token);
      if (eosIds.has(token) || tokens.length === maxTokens) return { tokens, numRuns };
      if (token === drafts[i]) continue;
      model.rewind(model.length - drafts.length + i);
      pending = [token];
      break;
    }
  }
}

/**
 * The time of a token without and with a grammar: the same tokens are read again and again, in turns.
 * @param {() => object} newMatcher
 * @returns {Promise<{without: number, with: number}>} milliseconds, medians of the turns
 */
export async function measure(model, prompt, tokens, newMatcher, numTurns = 30) {
  const times = { without: [], with: [] };
  for (let turn = -numTurns; turn < 2 * numTurns; turn++) { // those below 0 are for the browser to compile the code
    const matcher = turn % 2 ? newMatcher() : undefined;
    model.rewind(0);
    let logits = await model.run(prompt);
    const begin = performance.now(); // of all tokens, because a browser's clock has steps of 0.1 ms
    for (const token of tokens) {
      choose(logits, logits.dims[0] - 1, matcher?.mask());
      matcher?.accept(token);
      logits = await model.run([token]);
    }
    if (turn >= 0) times[matcher ? "with" : "without"].push((performance.now() - begin) / tokens.length);
  }
  const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];
  return { without: median(times.without), with: median(times.with) };
}
