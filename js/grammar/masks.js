/** Which tokens may come next (`jsg/constrained/run/mask_cache.py`). */

import * as py from "./dist/layout.js";
import { GrammarError } from "./files.js";
import { found } from "./heap.js";

/** @typedef {import("./machine.js").Config} Config */

/** Finds masks by what decides them: the states, whether the text may end, and the frames that were read. */
export class MaskCache {
  /** @type {Map<string, Map<number, Map<string, Uint32Array>>>} */
  #decisions = new Map();
  /** How many masks are kept. */
  size = 0;

  /** @param {import("./machine.js").Machine} machine @param {import("./vocabulary.js").Vocabulary} vocabulary */
  constructor(machine, vocabulary) {
    this.machine = machine;
    this.vocabulary = vocabulary;
  }

  /** @param {Config} config @param {boolean} isComplete */
  find(config, isComplete) {
    const byDepth = found(this.#decisions, `${config.filter((_, i) => !(i & 1))} ${isComplete}`, () => new Map());
    for (const [depth, masks] of byDepth) {
      const mask = masks.get(this.machine.framesRead(config, depth));
      if (mask) return mask;
    }
    const [mask, depth] = this.#made(config, isComplete);
    found(byDepth, depth, () => new Map()).set(this.machine.framesRead(config, depth), mask);
    this.size++;
    return mask;
  }

  /** The mask, and how many frames were read to make it. @param {Config} config @param {boolean} isComplete @returns {[Uint32Array, number]} */
  #made(config, isComplete) {
    const { heap } = this.machine;
    const { numWords, eosMask } = this.vocabulary;
    const [taken, rest, read] = this.#taken(config);
    const place = heap.scratch("mask", numWords, 1, 4);
    heap.bytes.fill(0, place.address, place.address + 4 * numWords);
    const depth = Math.max(read, this.machine.walk(config, rest, place));
    const mask = heap.view(place, Uint32Array).slice();
    for (const part of isComplete ? [taken, eosMask] : [taken]) if (part) for (let i = 0; i < numWords; i++) mask[i] |= part[i];
    if (mask.every((word) => word === 0)) {
      throw new GrammarError("no token of this vocabulary may come next; a complete text needs an EOS token to end with");
    }
    return [mask, depth];
  }

  /** The mask of the largest slice that is allowed as a whole, the trie of the other tokens, and how many frames were read. @param {Config} config @returns {[Uint32Array | null, import("./vocabulary.js").Trie, number]} */
  #taken(config) {
    const [slices, trie] = [this.vocabulary.slices(), this.vocabulary.trie];
    let deepest = 0;
    const accepts = (/** @type {import("./vocabulary.js").Slice} */ slice) => {
      const [isSo, depth] = this.machine.acceptsAll(config, slice.chars, slice.maxChars());
      deepest = Math.max(deepest, depth);
      return isSo;
    };
    let part = null;
    if (this.machine.isDead(config, py._COMMON_BYTE)) {
      return [null, trie(), 0];
    } else if (accepts(slices.json)) {
      part = accepts(slices.text) ? slices.text : slices.json;
    } else if (accepts(slices.long)) {
      part = slices.long;
    } else {
      // If exactly the texts of up to `room` characters may come, tokens of ordinary characters need no walk.
      const [room, isExact, depth] = this.machine.textRoom(config, slices.json.chars, py.LONG_CHARS);
      deepest = Math.max(deepest, depth);
      if (room && isExact) return [this.vocabulary.room[room](), slices.json.rest(), deepest];
      if (room >= py.SHORT_CHARS) part = slices.short;
      else if (accepts(slices.lower)) part = accepts(slices.words) ? slices.words : slices.lower;
    }
    return part ? [part.mask(), part.rest(), deepest] : [null, trie(), deepest];
  }
}
