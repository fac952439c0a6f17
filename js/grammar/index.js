/**
 * Which tokens a grammar of jsg allows next, in a browser or in Node.
 *
 *     const grammar = await load(tables, vocabulary); // files of `jsg grammar export`
 *     const matcher = grammar.matcher();
 *     matcher.mask(); matcher.accept(token); matcher.forced(); matcher.isComplete; matcher.rollback(1);
 */

import * as py from "./dist/layout.js";
import { GrammarError, readTables } from "./files.js";
import { Machine } from "./machine.js";
import { MaskCache } from "./masks.js";
import { Vocabulary } from "./vocabulary.js";

export { GrammarError };

/** @typedef {import("./machine.js").Config} Config */

/** A configuration, null where a text has ended, and what is known of it. @typedef {object} Place
 * @property {Config | null} config @property {boolean} isComplete @property {Map<number, Place | null>} next
 * @property {Uint32Array | null} mask @property {Uint8Array | null} forced */

const SPECIAL_BYTE = 0xff; // begins a special token, as no text does

/** @type {Promise<WebAssembly.Module> | undefined} */
let kernels;

/** The kernels, which lie beside this module. */
async function compileKernels() {
  const url = new URL("./dist/kernels.wasm", import.meta.url);
  if (url.protocol !== "file:") return WebAssembly.compile(await (await fetch(url)).arrayBuffer());
  const { readFile } = await import("node:fs/promises");
  return WebAssembly.compile(await readFile(url));
}

/**
 * A grammar for one vocabulary, from the files that `jsg grammar export` wrote.
 * @param {Uint8Array | ArrayBuffer} tables
 * @param {Uint8Array | ArrayBuffer | Vocabulary} vocabulary the file, or the `vocabulary` of another grammar
 * @returns {Promise<Grammar>}
 * @throws {GrammarError} a file is damaged, or of another version, or something else
 */
export async function load(tables, vocabulary) {
  kernels ??= compileKernels();
  const words = vocabulary instanceof Vocabulary ? vocabulary : Vocabulary.read(vocabulary, kernels);
  return new Grammar(await readTables(tables), await words);
}

/** Where texts of one grammar have been. Its matchers share states, places and masks; no answer depends on another. */
class Grammar {
  /** @type {Map<string, Place>} */
  #places = new Map();
  #numBytes = 0;
  /** Above this share of what the machine may make, everything is forgotten. */
  fullest = py._FULL;
  /** Grows when all places are forgotten. */
  age = 0;

  /** @param {Awaited<ReturnType<typeof readTables>>} tables @param {Vocabulary} vocabulary */
  constructor(tables, vocabulary) {
    this.vocabulary = vocabulary;
    this.machine = new Machine(vocabulary.heap, tables, vocabulary.maxTokenLen);
    this.#forget();
    /** @type {Place} */
    this.ended = { config: null, isComplete: true, next: new Map(), mask: vocabulary.eosMask, forced: new Uint8Array() };
  }

  /** A matcher at the beginning of a text. */
  matcher() {
    return new Matcher(this);
  }

  /** The place that these tokens lead to from a place, null if one of them is not allowed. @param {number} id @param {Place} place */
  step(place, id) {
    if (this.vocabulary.eosIds.has(id)) return place.isComplete ? this.ended : null;
    const text = this.vocabulary.textOf(id);
    const config = place.config && text.length ? this.machine.advance(place.config, text) : null;
    if (!config) return null;
    const after = this.at(config);
    this.#numBytes += py._BYTES_PER_PLACE;
    // What is forced after a token is the rest of what was forced before it, if that was not cut off.
    const { forced } = place;
    const isRest = forced && forced.length > text.length && text.every((byte, i) => byte === forced[i]);
    if (isRest && forced.length <= py.MAX_FORCED_BYTES - py._MAX_CHAR_BYTES) after.forced ??= forced.subarray(text.length);
    place.next.set(id, after);
    return after;
  }

  /** @param {Place} place */
  mask(place) {
    return (place.mask ??= this.masks.find(/** @type {Config} */ (place.config), place.isComplete));
  }

  /** @param {Place} place */
  forced(place) {
    return (place.forced ??= this.machine.forcedRun(/** @type {Config} */ (place.config), py.MAX_FORCED_BYTES));
  }

  /** The place of a configuration. @param {Config} config */
  at(config) {
    const key = config.join();
    let place = this.#places.get(key);
    if (!place) {
      place = { config, isComplete: this.machine.isAccepting(config), next: new Map(), mask: null, forced: null };
      this.#places.set(key, place);
    }
    return place;
  }

  /** Forgets everything if too much is remembered. Matchers then read their tokens again. */
  bound() {
    const numBytes = this.#numBytes + this.masks.size * this.vocabulary.numWords * 4;
    if (numBytes > py.MEMO_BYTES || this.machine.fullness > this.fullest) this.#forget();
  }

  #forget() {
    if (this.age) this.machine.clear();
    this.#places.clear();
    this.masks = new MaskCache(this.machine, this.vocabulary);
    this.#numBytes = 0;
    this.age++;
    this.start = this.at(this.machine.start);
  }
}

/** Follows one text, token by token. */
class Matcher {
  #grammar;
  /** @type {number[]} */
  #tokens = [];
  /** @type {Place[]} */
  #passed;
  #age;

  /** @param {Grammar} grammar */
  constructor(grammar) {
    this.#grammar = grammar;
    this.#passed = [grammar.start];
    this.#age = grammar.age;
  }

  /** The tokens that were accepted and not taken back. */
  get tokens() {
    return [...this.#tokens];
  }

  /**
   * Which tokens may come next: token t is bit t & 31 of word t >> 5.
   * @param {Uint32Array} [out] where it is written
   * @throws {GrammarError} none may come, because the vocabulary cannot spell what should; or it took too much work
   */
  mask(out = new Uint32Array(this.#grammar.vocabulary.numWords)) {
    out.set(this.place.mask ?? this.#ask((place) => this.#grammar.mask(place)));
    return out;
  }

  /** Goes on by a token; false where it is not allowed, and then nothing has changed. @param {number} token */
  accept(token) {
    const after = this.place.next.get(token) ?? this.#ask((place) => this.#grammar.step(place, token));
    if (!after) return false;
    this.#tokens.push(token);
    this.#passed.push(after);
    return true;
  }

  /** Takes back the last tokens. @param {number} numTokens */
  rollback(numTokens) {
    if (!(Number.isInteger(numTokens) && numTokens >= 0 && numTokens <= this.#tokens.length)) {
      throw new RangeError(`a rollback must take back 0 to ${this.#tokens.length} tokens, but got ${numTokens}`);
    }
    this.#tokens.length -= numTokens;
    this.#passed.length = Math.max(this.#passed.length - numTokens, 1);
  }

  /** The text that must come next, up to a special token; "" where there is a choice or the text may end. */
  forced() {
    const bytes = this.forcedBytes();
    const special = bytes.indexOf(SPECIAL_BYTE);
    return new TextDecoder().decode(special < 0 ? bytes : bytes.subarray(0, special));
  }

  /** The bytes that must come next; a special token is its name between FF and FE. */
  forcedBytes() {
    return (this.place.forced ?? this.#ask((place) => this.#grammar.forced(place))).slice();
  }

  /** Whether the text matches the grammar as it is. */
  get isComplete() {
    return this.place.isComplete;
  }

  /** Another matcher at the place of this one, with the same tokens to take back. */
  fork() {
    const other = new Matcher(this.#grammar);
    other.#tokens = [...this.#tokens];
    other.#passed = [...this.#passed];
    other.#age = this.#age;
    return other;
  }

  /** The place of the text. If the grammar has forgotten it, the tokens are read again. */
  get place() {
    const grammar = this.#grammar;
    if (this.#age !== grammar.age) {
      this.#age = grammar.age;
      this.#passed = [grammar.start];
      for (const token of this.#tokens) {
        const place = this.#passed[this.#passed.length - 1];
        this.#passed.push(/** @type {Place} */ (place.next.get(token) ?? grammar.step(place, token)));
      }
      // Where the text needs much itself, half of the room that it leaves is used before everything is forgotten again.
      grammar.fullest = Math.max(py._FULL, (1 + grammar.machine.fullness) / 2);
    }
    return this.#passed[this.#passed.length - 1];
  }

  /** @template T @param {(place: Place) => T} question @returns {T} */
  #ask(question) {
    const found = question(this.place);
    this.#grammar.bound();
    return found;
  }
}
