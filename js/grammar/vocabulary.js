/** The tokens of a model, as tries and slices for masks (`jsg/constrained/run/vocab.py`, `trie.py` and `slices.py`). */

import { readVocabulary } from "./files.js";
import { Heap } from "./heap.js";

export const [SHORT_CHARS, LONG_CHARS] = [10, 30];
const [IS_TEXT, IS_JSON, IS_WORDS, IS_LOWER] = [1, 2, 4, 8];
const TEXT = ordinaryChars("");
const JSON_TEXT = ordinaryChars('"\\');
const WORDS = asciiChars(/[A-Za-z0-9_ ]/);
const LOWER = asciiChars(/[a-z]/);

/** The arrays of a `Trie` in `trie.py`, in its order. @typedef {import("./heap.js").Place[]} Trie */
/**
 * Tokens of complete characters of one set: the set as an automaton (`Slice.chars` in `slices.py`), the most characters
 * of one of them, a bit for each, and the trie of all other tokens.
 * @typedef {{chars: Int16Array, maxChars: number, mask: () => Uint32Array, rest: () => Trie}} Slice
 */

/** The tokens in the order of their texts. What masks need is made when it is first used. */
export class Vocabulary {
  /** @param {Uint8Array | ArrayBuffer} file @param {Promise<WebAssembly.Module>} kernels */
  static async read(file, kernels) {
    return new Vocabulary(await readVocabulary(file), new Heap(await kernels));
  }

  /** @param {Awaited<ReturnType<typeof readVocabulary>>} given @param {Heap} heap */
  constructor({ size, eosIds, ids, start, texts }, heap) {
    [this.heap, this.ids, this.start, this.texts] = [heap, ids, start, texts];
    this.numWords = (size + 31) >> 5;
    this.eosIds = new Set(eosIds);
    this.eosMask = this.#mask(eosIds, () => true);
    this.maxTokenLen = 0;
    for (let i = 0; i < ids.length; i++) this.maxTokenLen = Math.max(this.maxTokenLen, start[i + 1] - start[i]);
    this.places = new Int32Array(size).fill(-1);
    for (let i = 0; i < ids.length; i++) this.places[ids[i]] = i;
    this.trie = lazy(() => this.#trie(() => true));
    this.slices = lazy(() => this.#slices());
    /** The mask of the tokens of the slice `json` with at most this many characters. */
    this.room = [...Array(LONG_CHARS + 1).keys()].map((most) => lazy(() => this.#slice(JSON_TEXT, IS_JSON, most).mask()));
  }

  /** The bytes that a grammar reads for a token; none where it reads none. @param {number} id */
  textOf(id) {
    const place = this.places[id] ?? -1;
    return place < 0 ? new Uint8Array() : this.texts.subarray(this.start[place], this.start[place + 1]);
  }

  #slices() {
    return {
      short: this.#slice(JSON_TEXT, IS_JSON, SHORT_CHARS),
      long: this.#slice(JSON_TEXT, IS_JSON, LONG_CHARS),
      json: this.#slice(JSON_TEXT, IS_JSON),
      text: this.#slice(TEXT, IS_TEXT),
      words: this.#slice(WORDS, IS_WORDS),
      lower: this.#slice(LOWER, IS_LOWER),
    };
  }

  /** @param {Int16Array} chars @param {number} kind @param {number} most @returns {Slice} */
  #slice(chars, kind, most = Infinity) {
    const { kinds, numChars } = this.#kinds();
    const isIn = (/** @type {number} */ i) => (kinds[i] & kind) !== 0 && numChars[i] <= most;
    const maxChars = numChars.reduce((longest, count, i) => (isIn(i) ? Math.max(longest, count) : longest), 1);
    return { chars, maxChars, mask: lazy(() => this.#mask(this.ids, isIn)), rest: lazy(() => this.#trie((i) => !isIn(i))) };
  }

  /** The sets of characters that each text is made of, and how many characters begin in it. */
  #kinds = lazy(() => {
    const [kinds, numChars] = [new Uint8Array(this.ids.length), new Uint16Array(this.ids.length)];
    for (let i = 0; i < kinds.length; i++) {
      let [kind, state] = [IS_TEXT | IS_JSON | IS_WORDS | IS_LOWER, 0];
      for (let at = this.start[i]; at < this.start[i + 1]; at++) {
        const byte = this.texts[at];
        if ((byte & 0xc0) !== 0x80) numChars[i]++;
        if (state >= 0) state = TEXT[state * 256 + byte];
        if (byte === 0x22 || byte === 0x5c) kind &= ~IS_JSON;
        if (WORDS[byte] < 0) kind &= ~IS_WORDS;
        if (LOWER[byte] < 0) kind &= ~IS_LOWER;
      }
      kinds[i] = state === 0 ? kind : 0;
    }
    return { kinds, numChars };
  });

  /** A bit for each id at a place that is in. @param {Int32Array} ids @param {(place: number) => boolean} isIn */
  #mask(ids, isIn) {
    const mask = new Uint32Array(this.numWords);
    for (let i = 0; i < ids.length; i++) if (isIn(i)) mask[ids[i] >> 5] |= 1 << (ids[i] & 31);
    return mask;
  }

  /** The trie of the tokens at places that are in. @param {(place: number) => boolean} isIn @returns {Trie} */
  #trie(isIn) {
    const { heap, ids, start, texts } = this;
    const shared = this.#shared();
    const [places, common] = [new Int32Array(ids.length), new Uint16Array(ids.length)];
    let [num, numNodes, numFirst, least] = [0, 1, 0, 0];
    for (let i = 0; i < ids.length; i++) {
      least = Math.min(least, shared[i]); // two texts share the least that any two neighbours between them share
      if (!isIn(i)) continue;
      [places[num], common[num]] = [i, least];
      num++;
      numNodes += start[i + 1] - start[i] - least;
      numFirst += least === 0 ? 1 : 0;
      least = Infinity;
    }
    const shapes = [[numNodes, 1], [numNodes, 2], [numNodes, 4], [numNodes + 1, 4], [num, 4], [numFirst, 4], [numFirst, 1]];
    const trie = shapes.map(([length, itemBytes]) => heap.shared.array(length, 1, itemBytes));
    const types = [Uint8Array, Uint16Array, Int32Array, Int32Array, Int32Array, Int32Array, Uint8Array];
    const [byte, depth, skip, tokenStart, tokens, first, firstByte] = trie.map((place, i) => heap.view(place, types[i]));
    const open = new Int32Array(this.maxTokenLen + 1); // the open node of each depth
    let [node, deepest, firsts] = [0, 0, 0];
    for (let k = 0; k < num; k++) {
      // A text adds nodes for the bytes that it does not share with the one before it, and ends at the last node so far.
      const begin = start[places[k]];
      for (; deepest > common[k]; deepest--) skip[open[deepest]] = node + 1;
      if (deepest === 0) [first[firsts], firstByte[firsts++]] = [node + 1, texts[begin]];
      for (let at = begin + deepest; at < start[places[k] + 1]; at++) {
        open[++deepest] = ++node;
        byte[node] = texts[at];
        depth[node] = deepest;
        tokenStart[node] = k;
      }
      tokens[k] = ids[places[k]];
    }
    for (; deepest >= 0; deepest--) skip[open[deepest]] = numNodes;
    tokenStart[numNodes] = num;
    return trie;
  }

  /** How many bytes each text shares with the one before it; 0 for the first. */
  #shared = lazy(() => {
    const { start, texts } = this;
    const shared = new Uint16Array(this.ids.length);
    for (let i = 1; i < shared.length; i++) {
      const [before, begin, end] = [start[i - 1], start[i], start[i + 1]];
      const most = Math.min(begin - before, end - begin);
      while (shared[i] < most && texts[before + shared[i]] === texts[begin + shared[i]]) shared[i]++;
    }
    return shared;
  });
}

/** A function that makes a value when it is first called, and keeps it. @template T @param {() => T} make @returns {() => T} */
function lazy(make) {
  /** @type {T | undefined} */
  let made;
  return () => (made ??= make());
}

/** All characters but controls and `excluded`: int16[states, 256], the next state or -1. @param {string} excluded */
function ordinaryChars(excluded) {
  const table = new Int16Array(9 * 256).fill(-1);
  const steps = [ // the bytes that may come in each state, and the state after them (RFC 3629); C2 80 to C2 9F are controls
    [0, 0x20, 0x7e, 0], [0, 0xc2, 0xc2, 8], [0, 0xc3, 0xdf, 1], [0, 0xe0, 0xe0, 2], [0, 0xe1, 0xef, 3], [0, 0xed, 0xed, 4],
    [0, 0xf0, 0xf0, 5], [0, 0xf1, 0xf3, 6], [0, 0xf4, 0xf4, 7], [1, 0x80, 0xbf, 0], [2, 0xa0, 0xbf, 1], [3, 0x80, 0xbf, 1],
    [4, 0x80, 0x9f, 1], [5, 0x90, 0xbf, 3], [6, 0x80, 0xbf, 3], [7, 0x80, 0x8f, 3], [8, 0xa0, 0xbf, 0],
  ];
  for (const [state, begin, end, after] of steps) table.fill(after, state * 256 + begin, state * 256 + end + 1);
  for (const char of excluded) table[char.charCodeAt(0)] = -1;
  return table;
}

/** These ASCII characters and no others. @param {RegExp} chars */
function asciiChars(chars) {
  return Int16Array.from({ length: 256 }, (_, byte) => (byte < 128 && chars.test(String.fromCharCode(byte)) ? 0 : -1));
}
