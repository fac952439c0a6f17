/** The tokens of a model, as tries and slices for masks (`jsg/constrained/run/vocab.py`, `trie.py` and `slices.py`). */

import { arrayAt, damaged, readFile } from "./files.js";

const WHAT = "a vocabulary";
const FORM = /** @type {const} */ ({
  kind: "jsg.vocabulary",
  version: 1,
  what: WHAT,
  arrays: [["size", "i64"], ["eosIds", "i32"], ["ids", "i32"], ["textStart", "i32"], ["texts", "u8"]],
});
const MAX_TOKEN_BYTES = 65_535;
const [IS_TEXT, IS_JSON, IS_WORDS, IS_LOWER] = [1, 2, 4, 8];
export const SHORT_CHARS = 10;
export const LONG_CHARS = 30;
const NO_CHARS = -1;

/**
 * The nodes of a prefix tree in preorder; node 0 is the root. See `Trie` in `trie.py`.
 * @typedef {{byte: Uint8Array, depth: Uint16Array, skip: Int32Array, tokenStart: Int32Array, tokens: Int32Array,
 *   first: Int32Array, firstByte: Uint8Array}} Trie
 */

/** Tokens that consist of complete characters of one set, up to a number of them. */
export class Slice {
  #vocabulary;
  /**
   * @param {Vocabulary} vocabulary @param {Int16Array} chars the set as an automaton over UTF-8
   * @param {(place: number) => boolean} isIn
   */
  constructor(vocabulary, chars, isIn) {
    this.#vocabulary = vocabulary;
    this.chars = chars;
    this.isIn = isIn;
    const { numChars } = vocabulary.kinds;
    this.maxChars = 1;
    for (let i = 0; i < numChars.length; i++) if (isIn(i) && numChars[i] > this.maxChars) this.maxChars = numChars[i];
  }
  /** A bit for each of the tokens. */
  get mask() {
    return kept(this, "mask", () => this.#vocabulary.maskOf(this.isIn));
  }
  /** All other tokens. */
  get rest() {
    return kept(this, "rest", () => this.#vocabulary.trieOf((place) => !this.isIn(place)));
  }
}

/** The tokens by the order of their texts. Everything is made when it is first needed, and kept. */
export class Vocabulary {
  /** @type {Uint32Array[]} */
  #rooms = [];

  /** @param {{size: number, eosIds: Int32Array, ids: Int32Array, textStart: Int32Array, texts: Uint8Array}} given */
  constructor({ size, eosIds, ids, textStart, texts }) {
    this.size = size;
    this.eosIds = new Set(eosIds);
    this.numWords = (size + 31) >> 5;
    this.ids = ids;
    this.start = textStart;
    this.texts = texts;
    /** How many bytes each text shares with the one before it. */
    this.shared = new Uint16Array(ids.length);
    /** Bytes of the longest text. */
    this.maxTokenLen = 0;
    this.places = new Int32Array(size).fill(-1);
    let before = 0;
    for (let i = 0, begin = 0; i < ids.length; i++) {
      const end = textStart[i + 1];
      const length = end - begin;
      const most = Math.min(length, begin - before);
      let same = 0;
      while (same < most && texts[before + same] === texts[begin + same]) same++;
      const isAfter = same === most ? length > most || (length === begin - before && ids[i] > ids[i - 1]) : texts[before + same] < texts[begin + same];
      const isKnown = !(ids[i] >= 0 && ids[i] < size) || this.places[ids[i]] >= 0;
      if (length <= 0 || length > MAX_TOKEN_BYTES || isKnown || (i > 0 && !isAfter)) {
        throw damaged(WHAT, "its texts are not in order");
      }
      this.shared[i] = i ? same : 0;
      this.places[ids[i]] = i;
      if (length > this.maxTokenLen) this.maxTokenLen = length;
      [before, begin] = [begin, end];
    }
    this.eosMask = new Uint32Array(this.numWords);
    for (const id of eosIds) this.eosMask[id >> 5] |= 1 << (id & 31);
  }

  /** @param {Uint8Array | ArrayBuffer} given */
  static async read(given) {
    const { bytes, places } = await readFile(given, FORM);
    const read = (/** @type {string} */ name, /** @type {any} */ type) => arrayAt(bytes, places[name], type);
    const [eosIds, ids, textStart] = ["eosIds", "ids", "textStart"].map((name) => read(name, Int32Array));
    const [size, texts] = [Number(read("size", BigInt64Array)[0]), read("texts", Uint8Array)];
    const isSound =
      size > 0 &&
      size < 2 ** 31 &&
      textStart.length === ids.length + 1 &&
      textStart[0] === 0 &&
      textStart[ids.length] === texts.length &&
      eosIds.every((id, i) => id > (i ? eosIds[i - 1] : -1) && id < size);
    if (!isSound) throw damaged(WHAT, "its lengths do not agree");
    return new Vocabulary({ size, eosIds, ids, textStart, texts });
  }

  /** The bytes that a grammar reads for a token; none where it reads none. @param {number} id */
  textOf(id) {
    const place = this.places[id] ?? -1;
    return place < 0 ? new Uint8Array() : this.texts.subarray(this.start[place], this.start[place + 1]);
  }

  /** All tokens. */
  get trie() {
    return kept(this, "trie", () => this.trieOf(() => true));
  }

  /** The sets of characters that each text is made of, and how many characters begin in it. */
  get kinds() {
    return kept(this, "kinds", () => {
      const [sets, numChars] = [new Uint8Array(this.ids.length), new Uint16Array(this.ids.length)];
      for (let i = 0; i < sets.length; i++) {
        let [set, state, count] = [IS_TEXT | IS_JSON | IS_WORDS | IS_LOWER, 0, 0];
        for (let at = this.start[i]; at < this.start[i + 1]; at++) {
          const byte = this.texts[at];
          if ((byte & 0xc0) !== 0x80) count++;
          if (state >= 0) state = TEXT[state * 256 + byte];
          if (JSON_TEXT[byte] < 0) set &= ~IS_JSON;
          if (WORDS[byte] < 0) set &= ~IS_WORDS;
          if (LOWER[byte] < 0) set &= ~IS_LOWER;
        }
        sets[i] = state === 0 ? set : 0;
        numChars[i] = count;
      }
      return { sets, numChars };
    });
  }

  /** The slices of `slices.py`. */
  get slices() {
    return kept(this, "slices", () => {
      const { sets, numChars } = this.kinds;
      const of = (/** @type {Int16Array} */ chars, /** @type {number} */ set, most = Infinity) =>
        new Slice(this, chars, (i) => (sets[i] & set) !== 0 && numChars[i] <= most);
      return {
        short: of(JSON_TEXT, IS_JSON, SHORT_CHARS),
        long: of(JSON_TEXT, IS_JSON, LONG_CHARS),
        json: of(JSON_TEXT, IS_JSON),
        text: of(TEXT, IS_TEXT),
        words: of(WORDS, IS_WORDS),
        lower: of(LOWER, IS_LOWER),
      };
    });
  }

  /** The mask of the tokens of `slices.json` with at most this many characters. @param {number} most */
  room(most) {
    const { sets, numChars } = this.kinds;
    return (this.#rooms[most] ??= this.maskOf((i) => (sets[i] & IS_JSON) !== 0 && numChars[i] <= most));
  }

  /** A bit for each token at a place that is in. @param {(place: number) => boolean} isIn */
  maskOf(isIn) {
    const mask = new Uint32Array(this.numWords);
    for (let i = 0; i < this.ids.length; i++) if (isIn(i)) mask[this.ids[i] >> 5] |= 1 << (this.ids[i] & 31);
    return mask;
  }

  /** The trie of the tokens at places that are in. @param {(place: number) => boolean} isIn @returns {Trie} */
  trieOf(isIn) {
    const { ids, shared, start, texts } = this;
    const places = new Int32Array(ids.length);
    const common = new Uint16Array(ids.length);
    let [num, numNodes, least] = [0, 1, 0];
    for (let i = 0; i < ids.length; i++) {
      // What two texts share is the least that any two neighbours between them share.
      least = Math.min(least, shared[i]);
      if (!isIn(i)) continue;
      numNodes += start[i + 1] - start[i] - least;
      places[num] = i;
      common[num++] = least;
      least = MAX_TOKEN_BYTES;
    }
    const [byte, depth] = [new Uint8Array(numNodes), new Uint16Array(numNodes)];
    const [skip, tokenStart] = [new Int32Array(numNodes), new Int32Array(numNodes + 1)];
    const [tokens, first, firstByte] = [new Int32Array(num), /** @type {number[]} */ ([]), /** @type {number[]} */ ([])];
    const open = new Int32Array(this.maxTokenLen + 1); // the open node of each depth
    let [node, deepest] = [0, 0];
    for (let k = 0; k < num; k++) {
      const begin = start[places[k]];
      const end = start[places[k] + 1];
      // A text that is equal to the one before it, or whose prefixes all have nodes, adds nodes for its last bytes only.
      for (; deepest > common[k]; deepest--) skip[open[deepest]] = node + 1;
      for (let at = begin + common[k]; at < end; at++) {
        open[++deepest] = ++node;
        byte[node] = texts[at];
        depth[node] = deepest;
        tokenStart[node] = k;
        if (deepest === 1) {
          first.push(node);
          firstByte.push(texts[at]);
        }
      }
      tokens[k] = ids[places[k]];
    }
    for (; deepest >= 0; deepest--) skip[open[deepest]] = numNodes;
    tokenStart[numNodes] = num;
    return { byte, depth, skip, tokenStart, tokens, first: new Int32Array(first), firstByte: new Uint8Array(firstByte) };
  }
}

/** The value of a property that is made at its first use. @template T @param {object} owner @param {() => T} made */
function kept(owner, /** @type {string} */ name, made) {
  const value = made();
  Object.defineProperty(owner, name, { value });
  return value;
}

/** All characters but controls and `excluded`: int16[states, 256], the next state or -1. @param {string} excluded */
function ordinaryChars(excluded) {
  // The bytes that may come in each state, and the state after them: RFC 3629, and C1 (C2 80 to C2 9F) left out.
  const steps = [
    [0, 0x20, 0x7e, 0], [0, 0xc2, 0xc2, 8], [0, 0xc3, 0xdf, 1], [0, 0xe0, 0xe0, 2], [0, 0xe1, 0xef, 3], [0, 0xed, 0xed, 4],
    [0, 0xf0, 0xf0, 5], [0, 0xf1, 0xf3, 6], [0, 0xf4, 0xf4, 7], [1, 0x80, 0xbf, 0], [2, 0xa0, 0xbf, 1], [3, 0x80, 0xbf, 1],
    [4, 0x80, 0x9f, 1], [5, 0x90, 0xbf, 3], [6, 0x80, 0xbf, 3], [7, 0x80, 0x8f, 3], [8, 0xa0, 0xbf, 0],
  ];
  const table = new Int16Array(9 * 256).fill(NO_CHARS);
  for (const [state, begin, end, after] of steps) table.fill(after, state * 256 + begin, state * 256 + end + 1);
  for (const char of excluded) table[char.charCodeAt(0)] = NO_CHARS;
  return table;
}

/** These ASCII characters and no others. @param {RegExp} chars */
function asciiChars(chars) {
  return Int16Array.from({ length: 256 }, (_, byte) => (byte < 128 && chars.test(String.fromCharCode(byte)) ? 0 : NO_CHARS));
}

const TEXT = ordinaryChars("");
const JSON_TEXT = ordinaryChars('"\\');
const WORDS = asciiChars(/[A-Za-z0-9_ ]/);
const LOWER = asciiChars(/[a-z]/);
