/** The tokens of a model, as tries and slices for masks (`jsg/constrained/run/vocab.py`, `trie.py` and `slices.py`). */

import * as py from "./dist/layout.js";
import { readVocabulary } from "./files.js";
import { Heap, found } from "./heap.js";

/** Sets of characters that a text may be made of, as bits. */
const [IS_TEXT, IS_JSON, IS_WORDS, IS_LOWER] = [1, 2, 4, 8];
/** Each set as an automaton over UTF-8: int16[states, 256], the next state or -1. */
const [TEXT, JSON_TEXT, WORDS, LOWER] = Object.values(py.CHARS).map((runs) =>
  Int16Array.from(runs.flatMap(([next, count]) => Array(count).fill(next))),
);
/** The sets that each byte may be in. */
const KINDS = Uint8Array.from(WORDS, (words, byte) => {
  const isJson = byte > 0x7f || JSON_TEXT[byte] >= 0;
  return IS_TEXT | (isJson ? IS_JSON : 0) | (words < 0 ? 0 : IS_WORDS) | (LOWER[byte] < 0 ? 0 : IS_LOWER);
});

/** The arrays of a `Trie` in `trie.py`, in its order. @typedef {import("./heap.js").Place[]} Trie */
/** A set as an automaton, its tokens (by place and as a mask) and the most characters of one, and the trie of all others.
 * @typedef {{chars: Int16Array, tokens: () => {isIn: Uint8Array, mask: Uint32Array, maxChars: number}, rest: () => Trie}} Slice */

/** The tokens in the order of their texts. What masks need is made when it is first used. */
export class Vocabulary {
  /** @type {Map<number, Uint32Array>} */
  #rooms = new Map();

  /** @param {Uint8Array | ArrayBuffer} file @param {Promise<WebAssembly.Module>} kernels */
  static async read(file, kernels) {
    return new Vocabulary(await readVocabulary(file), new Heap(await kernels));
  }

  /** @param {Awaited<ReturnType<typeof readVocabulary>>} given @param {Heap} heap */
  constructor({ size, eosIds, ids, start, texts }, heap) {
    [this.heap, this.ids, this.start, this.texts] = [heap, ids, start, texts];
    this.numWords = (size + 31) >> 5;
    this.eosIds = new Set(eosIds);
    this.eosMask = new Uint32Array(this.numWords);
    for (const id of eosIds) this.eosMask[id >> 5] |= 1 << (id & 31);
    this.maxTokenLen = 0;
    this.places = new Int32Array(size).fill(-1);
    for (let i = 0; i < ids.length; i++) {
      this.places[ids[i]] = i;
      this.maxTokenLen = Math.max(this.maxTokenLen, start[i + 1] - start[i]);
    }
    this.trie = lazy(() => this.#trieOf(new Uint8Array(ids.length)));
    this.slices = {
      short: this.#slice(JSON_TEXT, IS_JSON, py.SHORT_CHARS),
      long: this.#slice(JSON_TEXT, IS_JSON, py.LONG_CHARS),
      json: this.#slice(JSON_TEXT, IS_JSON),
      text: this.#slice(TEXT, IS_TEXT),
      words: this.#slice(WORDS, IS_WORDS),
      lower: this.#slice(LOWER, IS_LOWER),
    };
  }

  /** The bytes that a grammar reads for a token; none where it reads none. @param {number} id */
  textOf(id) {
    const place = this.places[id] ?? -1;
    return place < 0 ? new Uint8Array() : this.texts.subarray(this.start[place], this.start[place + 1]);
  }

  /** The mask of the tokens of the slice `json` with at most this many characters. @param {number} most */
  room(most) {
    return found(this.#rooms, most, () => this.#slice(JSON_TEXT, IS_JSON, most).tokens().mask);
  }

  /** Tokens of complete characters of one set, up to a number of them. @param {Int16Array} chars @param {number} kind @returns {Slice} */
  #slice(chars, kind, most = Infinity) {
    const tokens = lazy(() => {
      const { kinds, numChars } = this.#kinds();
      const isIn = new Uint8Array(kinds.length);
      const mask = new Uint32Array(this.numWords);
      let maxChars = 1;
      for (let i = 0; i < kinds.length; i++) {
        if (!(kinds[i] & kind) || numChars[i] > most) continue;
        isIn[i] = 1;
        mask[this.ids[i] >> 5] |= 1 << (this.ids[i] & 31);
        if (numChars[i] > maxChars) maxChars = numChars[i];
      }
      return { isIn, mask, maxChars };
    });
    return { chars, tokens, rest: lazy(() => this.#trieOf(tokens().isIn)) };
  }

  /** The sets of characters that each text is made of, and how many characters begin in it. */
  #kinds = lazy(() => {
    const { start, texts } = this;
    const kinds = new Uint8Array(this.ids.length);
    const numChars = new Uint16Array(this.ids.length);
    for (let i = 0; i < kinds.length; i++) {
      let kind = IS_TEXT | IS_JSON | IS_WORDS | IS_LOWER;
      let state = 0;
      for (let at = start[i]; at < start[i + 1]; at++) {
        kind &= KINDS[texts[at]];
        numChars[i] += (texts[at] & 0xc0) !== 0x80 ? 1 : 0;
        state = state < 0 ? state : TEXT[state * 256 + texts[at]];
      }
      kinds[i] = state === 0 ? kind : 0;
    }
    return { kinds, numChars };
  });

  /** How many bytes each text shares with the one before it; 0 for the first. */
  #shared = lazy(() => {
    const { start, texts } = this;
    const shared = new Uint16Array(this.ids.length);
    for (let i = 1; i < shared.length; i++) {
      const most = Math.min(start[i] - start[i - 1], start[i + 1] - start[i]);
      let same = 0;
      while (same < most && texts[start[i - 1] + same] === texts[start[i] + same]) same++;
      shared[i] = same;
    }
    return shared;
  });

  /** The trie of the tokens that are not left out, by their places. @param {Uint8Array} isOut @returns {Trie} */
  #trieOf(isOut) {
    const { heap, ids, start, texts } = this;
    const shared = this.#shared();
    const common = new Uint16Array(ids.length);
    let [num, numNodes, numFirst, least] = [0, 1, 0, 0];
    for (let i = 0; i < ids.length; i++) {
      if (shared[i] < least) least = shared[i]; // two texts share the least that any neighbours between them share
      if (isOut[i]) continue;
      common[i] = least;
      num++;
      numNodes += start[i + 1] - start[i] - least;
      if (least === 0) numFirst++;
      least = Infinity;
    }
    const lengths = [numNodes, numNodes, numNodes, numNodes + 1, num, numFirst, numFirst];
    const types = [Uint8Array, Uint16Array, Int32Array, Int32Array, Int32Array, Int32Array, Uint8Array];
    const trie = types.map((type, i) => heap.shared.array(lengths[i], 1, type.BYTES_PER_ELEMENT));
    const [byte, depth, skip, tokenStart, tokens, first, firstByte] = trie.map((place, i) => heap.view(place, types[i]));
    const open = new Int32Array(this.maxTokenLen + 1); // the open node of each depth
    let [node, deepest, firsts, k] = [0, 0, 0, 0];
    for (let i = 0; i < ids.length; i++) {
      if (isOut[i]) continue;
      // A text adds nodes for the bytes that it does not share with the one before it, and ends at the last node so far.
      for (; deepest > common[i]; deepest--) skip[open[deepest]] = node + 1;
      if (deepest === 0) {
        first[firsts] = node + 1;
        firstByte[firsts++] = texts[start[i]];
      }
      for (let at = start[i] + deepest; at < start[i + 1]; at++) {
        open[++deepest] = ++node;
        byte[node] = texts[at];
        depth[node] = deepest;
        tokenStart[node] = k;
      }
      tokens[k++] = ids[i];
    }
    for (; deepest >= 0; deepest--) skip[open[deepest]] = numNodes;
    tokenStart[numNodes] = num;
    return trie;
  }
}

/** A function that makes a value when it is first called, and keeps it. @template T @param {() => T} make @returns {() => T} */
function lazy(make) {
  /** @type {T | undefined} */
  let made;
  return () => (made ??= make());
}
