/** A grammar bound to a vocabulary, and what is known of its texts (`jsg/constrained/grammar.py` and `mask_cache.py`). */

import * as py from "./dist/layout.js";
import { GrammarError } from "./files.js";
import { found } from "./heap.js";
import { Machine } from "./machine.js";

const ROOM = 1.5; // for what texts in use need, and for more

/** Where texts have been: a configuration, empty where they have ended, and what is known of it: also the places that
 * were met after it, by token. @typedef {object} Place @property {Int32Array} config @property {boolean} isComplete
 * @property {Map<number, Place>} next @property {Uint32Array} [mask] @property {Uint8Array} [forced] */

export class Grammar {
  /** @type {Map<string, Place>} */
  #places = new Map();
  /** Masks by what decided them: states and whether the text may end, how many frames were read, what they hold. */
  #masks = new Map();
  #numBytes = 0;
  /** Above this share of what may be remembered, everything is forgotten. */
  #most = py._FULL;
  /** Grows when everything is forgotten, which makes all places invalid. */
  age = 1;

  /** @param {Awaited<ReturnType<typeof import("./files.js").readTables>>} tables @param {import("./vocabulary.js").Vocabulary} vocabulary */
  constructor(tables, vocabulary) {
    this.vocabulary = vocabulary;
    this.machine = new Machine(vocabulary.heap, tables, vocabulary.maxTokenLen);
    /** @type {Place} */
    this.ended = { config: new Int32Array(), isComplete: true, next: new Map(), mask: vocabulary.eosMask, forced: new Uint8Array() };
  }

  get #fullness() {
    return Math.max((py._FULL * this.#numBytes) / py.MEMO_BYTES, this.machine.fullness);
  }

  /** Forgets everything if it is too much, and says whether it was. */
  bound(most = this.#most) {
    if (this.#fullness <= most) return false;
    this.machine.clear();
    this.#places.clear();
    this.#masks.clear();
    [this.#numBytes, this.#most] = [0, py._FULL];
    this.age++;
    return true;
  }

  /** The places that tokens lead to, from the start on. @param {number[]} tokens */
  placesOf(tokens) {
    const before = this.#fullness;
    const places = [this.#at(this.machine.start)];
    for (const token of tokens) places.push(this.step(places[places.length - 1], token));
    // What texts in use need is not forgotten again at once, however many they are.
    if (this.#fullness > before) this.#most = Math.max(this.#most, ROOM * this.#fullness);
    return places;
  }

  /** The place that a token leads to; null where it is not allowed. @param {Place} place @param {number} id */
  step(place, id) {
    const known = place.next.get(id);
    if (known) return known;
    if (this.vocabulary.eosIds.has(id)) return place.isComplete ? this.ended : null;
    const text = this.vocabulary.textOf(id);
    this.machine.refuel();
    const config = text.length && place !== this.ended ? this.machine.advance(place.config, text) : null;
    if (!config) return null;
    const after = this.#at(config);
    place.next.set(id, after);
    this.#numBytes += py._BYTES_PER_PLACE;
    // What is forced after a part of a forced text is the rest of it, unless it was cut off.
    const isPart = place.forced?.length <= py.MAX_FORCED_BYTES - py._MAX_CHAR_BYTES && text.length < place.forced.length;
    if (isPart && text.every((byte, i) => byte === place.forced[i])) {
      after.forced ??= place.forced.subarray(text.length);
    }
    return after;
  }

  /** @param {Place} place */
  forced(place) {
    this.machine.refuel();
    if (!place.forced) this.#numBytes += (place.forced = this.machine.forcedRun(place.config, py.MAX_FORCED_BYTES)).length;
    return place.forced;
  }

  /** @param {Place} place @returns {Uint32Array} */
  mask(place) {
    if (place.mask) return place.mask;
    const { config, isComplete } = place;
    this.machine.refuel();
    const byDepth = found(this.#masks, `${config.filter((_, i) => !(i & 1))} ${isComplete}`, () => new Map());
    for (const [depth, masks] of byDepth) place.mask ??= masks.get(this.machine.framesRead(config, depth));
    if (place.mask) return place.mask;
    const [taken, rest, read] = this.#taken(config);
    const words = this.vocabulary.heap.scratch("mask", this.vocabulary.numWords, 1, 4);
    this.vocabulary.heap.view(words, Uint32Array).fill(0);
    const depth = Math.max(read, this.machine.walk(config, rest, words));
    const mask = this.vocabulary.heap.view(words, Uint32Array).slice();
    for (const part of [taken, isComplete ? this.vocabulary.eosMask : null]) part?.forEach((word, i) => (mask[i] |= word));
    if (mask.every((word) => word === 0)) {
      throw new GrammarError("no token of this vocabulary may come next; a complete text needs an EOS token to end with");
    }
    found(byDepth, depth, () => new Map()).set(this.machine.framesRead(config, depth), mask);
    this.#numBytes += mask.byteLength;
    return (place.mask = mask);
  }

  /** The mask of the largest slice that is allowed as a whole, the trie of the other tokens, and how many frames were read. @param {Int32Array} config @returns {[Uint32Array | null, import("./vocabulary.js").Trie, number]} */
  #taken(config) {
    const [slices, trie] = [this.vocabulary.slices, this.vocabulary.trie];
    let deepest = 0;
    const accepts = (/** @type {import("./vocabulary.js").Slice} */ slice) => {
      const [isSo, depth] = this.machine.acceptsAll(config, slice.chars, slice.tokens().maxChars);
      deepest = Math.max(deepest, depth);
      return isSo;
    };
    if (this.machine.isDead(config, py._COMMON_BYTE)) return [null, trie(), 0];
    let part = accepts(slices.json) ? slices.json : accepts(slices.long) ? slices.long : null;
    if (part === slices.json && accepts(slices.text)) part = slices.text;
    if (!part) {
      // If exactly the texts of up to `room` characters may come, tokens of ordinary characters need no walk.
      const [room, isExact, depth] = this.machine.textRoom(config, slices.json.chars, py.LONG_CHARS);
      deepest = Math.max(deepest, depth);
      if (room && isExact) return [this.vocabulary.room(room), slices.json.rest(), deepest];
      if (room >= py.SHORT_CHARS) part = slices.short;
      else if (accepts(slices.lower)) part = accepts(slices.words) ? slices.words : slices.lower;
    }
    return part ? [part.tokens().mask, part.rest(), deepest] : [null, trie(), deepest];
  }

  /** The place of a configuration. @param {Int32Array} config */
  #at(config) {
    return found(this.#places, config.join(), () => {
      this.#numBytes += (py._BYTES_PER_HEAD * config.length) / 2;
      return { config, isComplete: this.machine.isAccepting(config), next: new Map() };
    });
  }
}
