/**
 * Which tokens a grammar of jsg allows next, in a browser or in Node.
 *
 *     const grammar = await load(tables, vocabulary); // files of `jsg grammar export`
 *     const matcher = grammar.matcher();
 *     matcher.mask(); matcher.accept(token); matcher.forced(); matcher.isComplete; matcher.rollback(1);
 */

import * as py from "./dist/layout.js";
import { GrammarError, readTables } from "./files.js";
import { Grammar } from "./grammar.js";
import { Vocabulary } from "./vocabulary.js";

export { GrammarError };

const SPECIAL_BYTE = 0xff; // begins a special token, as no text does

/** @type {Promise<WebAssembly.Module> | undefined} */
let kernels;

/** The kernels, which lie beside this module. */
async function compileKernels() {
  const url = new URL("./dist/kernels.wasm", import.meta.url);
  if (url.protocol !== "file:") return WebAssembly.compile(await (await fetch(url)).arrayBuffer());
  return WebAssembly.compile(await (await import("node:fs/promises")).readFile(url));
}

/**
 * A grammar for one vocabulary, from files of `jsg grammar export`; or from the `vocabulary` of another grammar.
 * @param {Uint8Array | ArrayBuffer} tables @param {Uint8Array | ArrayBuffer | Vocabulary} vocabulary
 * @returns {Promise<{vocabulary: Vocabulary, matcher: () => Matcher}>}
 * @throws {GrammarError} a file is damaged, or of another version, or something else
 */
export async function load(tables, vocabulary) {
  kernels ??= compileKernels();
  kernels.catch(() => (kernels = undefined)); // so that they can be fetched another time
  const [grammar, words] = await Promise.all([
    readTables(tables),
    vocabulary instanceof Vocabulary ? vocabulary : Vocabulary.read(vocabulary, kernels),
  ]);
  const made = new Grammar(grammar, words);
  return { vocabulary: words, matcher: () => new Matcher(made) };
}

/** Follows one text, token by token. Matchers of one grammar share what they find out, and disturb each other in nothing. */
class Matcher {
  #grammar;
  /** @type {number[]} */
  #tokens = [];
  /** Where the text was before each token, and where it is. @type {import("./grammar.js").Place[]} */
  #places = [];
  #age = 0;

  /** @param {Grammar} grammar */
  constructor(grammar) {
    this.#grammar = grammar;
  }

  /** Which tokens may come next: token t is bit t & 31 of word t >> 5. Throws GrammarError where none may, or it is too
   * much work to find out. @param {Uint32Array} [out] where it is written */
  mask(out = new Uint32Array(this.#grammar.vocabulary.numWords)) {
    out.set(this.#ask((place) => this.#grammar.mask(place)));
    return out;
  }

  /** Goes on by a token; false where it is not allowed, and then nothing has changed. @param {number} token */
  accept(token) {
    if (typeof token !== "number") throw new TypeError(`a token must be a number, but got a ${typeof token}`);
    const after = this.#ask((place) => this.#grammar.step(place, token));
    if (!after) return false;
    this.#tokens.push(token);
    this.#places.push(after);
    return true;
  }

  /** Takes back the last tokens. @param {number} numTokens */
  rollback(numTokens) {
    if (!(Number.isInteger(numTokens) && numTokens >= 0 && numTokens <= this.#tokens.length)) {
      throw new RangeError(`a rollback must take back 0 to ${this.#tokens.length} tokens, but got ${numTokens}`);
    }
    this.#place; // so that there is one for each token
    this.#tokens.length -= numTokens;
    this.#places.length -= numTokens;
  }

  /** The text that must come next, up to a special token; "" where there is a choice, or the text may end, or ends
   * inside a character. */
  forced() {
    const bytes = this.forcedBytes();
    const special = bytes.indexOf(SPECIAL_BYTE);
    if ((bytes[0] & 0xc0) === 0x80) return "";
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(special < 0 ? bytes : bytes.subarray(0, special));
  }

  /** The bytes that must come next; a special token is its name between FF and FE. */
  forcedBytes() {
    return this.#ask((place) => this.#grammar.forced(place)).slice();
  }

  /** Whether the text matches the grammar as it is. */
  get isComplete() {
    return this.#place.isComplete;
  }

  /** The states and frames of the text, for tests; empty where it has ended. */
  get config() {
    return [...this.#place.config];
  }

  /** The answer to a question. No text is refused for what earlier ones left behind. @template T @param {(place: import("./grammar.js").Place) => T} question @returns {T} */
  #ask(question) {
    try {
      return question(this.#place);
    } catch (error) {
      if (!this.#grammar.bound(py._FULL)) throw error;
      return question(this.#place);
    }
  }

  /** Where the text is. The tokens are read again if the grammar has forgotten the places. */
  get #place() {
    this.#grammar.bound();
    if (this.#age !== this.#grammar.age) {
      this.#places = this.#grammar.placesOf(this.#tokens);
      this.#age = this.#grammar.age;
    }
    return this.#places[this.#places.length - 1];
  }
}
