/** The machine of a grammar (`jsg/constrained/run/machine.py` and `memory.py`): it calls kernels and gives them room. */

import { GrammarError } from "./files.js";

/** @typedef {import("./heap.js").Place} Place */
/** The state and the frame of each way to read a text, in pairs; frame -1 is the bottom. @typedef {Int32Array} Config */

const LIMITS = { states: 100_000, stack: 1_000, heads: 256, bytes: 64 << 20, steps: 40_000_000 };
const [STOPPED, DEAD, UNKNOWN] = [-(2 ** 30), -1, 0];
const [STATES, ACTIONS, FRAMES, ENTRIES, DEPTHS, HEADS, FULL, LOWEST, FUEL] = [0, 2, 3, 4, 5, 6, 7, 9, 10];
const [MAX_STACK, MAX_HEADS, FROZEN, FROZEN_DEPTH, FAILED, CALLED, NUM_COUNTERS] = [11, 12, 13, 14, 16, 19, 20];
const [OUT_OF_FUEL, TOO_MUCH_WORK] = [7, 8];
const [PARENT, RETURN, FRAME_LOOP, COUNT, MASK, SIBLING, DEPTH, FRAME_COLUMNS] = [0, 1, 2, 3, 4, 5, 6, 8];
const [LOOP_MIN, LOOP_MAX, LOOP_REQUIRED, LOOP_COLUMNS, UNBOUNDED] = [0, 1, 3, 10, 2 ** 60];
/** The arrays that kernels write, in the order of their record, with the bytes of an item. */
const ITEM_BYTES = {
  trans: 4, states: 4, members: 4, actions: 4, frames: 8, stateIndex: 4, frameIndex: 4, entries: 8,
  listState: 4, marks: 8, gather: 4, work: 4, ended: 8, heads: 4, counters: 8,
};
const NAMES = Object.keys(ITEM_BYTES);
/** Which of them are enlarged, by the counter that a kernel calls full. */
const GROWING = [["trans", "states"], ["members"], ["actions"], ["frames"], ["entries"], ["heads"]];
const [CHAR_NODES, ROOM_NODES, MAX_WORK, HINT_STEPS, MOST_CONTENTS] = [2048, 256, 1024, 10_000_000, 64];

export class Machine {
  /** @type {Record<string, Place>} */
  #arrays = {};
  /** What was made on the heap for a key since the last `clear`. @type {Map<unknown, any>} */
  #made = new Map();
  /** Whether the last question was refused for lack of room. */
  needsRoom = false;

  /** @param {import("./heap.js").Heap} heap @param {import("./tables.js").Tables} tables @param {number} maxTokenLen */
  constructor(heap, tables, maxTokenLen) {
    this.heap = heap;
    this.tables = tables;
    this.maxTokenLen = maxTokenLen;
    const base = heap.copy(tables.bytes).address;
    const { numbers, ...places } = tables.places;
    const arrays = Object.values(places).map((place) => ({ ...place, address: base + place.address }));
    this.t = heap.record([...arrays, tables.start, tables.numRules, tables.maxPush]);
    this.m = heap.record(NAMES.map(() => 0));
    this.numClasses = places.sets.columns;
    const onlyByte = new Int16Array(this.numClasses).fill(-1);
    tables.classes.forEach((klass, byte) => (onlyByte[klass] = tables.classes.indexOf(klass) < byte ? -1 : byte));
    this.onlyByte = heap.copy(onlyByte);
    this.end = heap.end;
    this.clear();
  }

  /** Forgets all states and frames, so that all configurations become invalid. */
  clear() {
    this.heap.release(this.end);
    this.#made.clear();
    const { positions, listStart, branches, loops } = this.tables.places;
    const levels = this.tables.numRules + branches.rows + loops.rows + 1;
    /** @type {Record<string, [number, number]>} */
    const shapes = {
      trans: [128, this.numClasses], states: [128, 4], members: [1024 + positions.rows, 1], actions: [1024, 1],
      frames: [128, FRAME_COLUMNS], stateIndex: [slotsOf(128), 1], frameIndex: [slotsOf(128), 1], entries: [64, 4],
      listState: [listStart.rows - 1, 1], marks: [positions.rows, 1], gather: [positions.rows, 1],
      work: [MAX_WORK + levels, 2], ended: [64, 11], heads: [130, 65], counters: [NUM_COUNTERS, 1],
    };
    for (const [name, [rows, columns]] of Object.entries(shapes)) this.#place(name, rows, columns);
    for (const name of ["stateIndex", "frameIndex", "listState"]) this.#free(name);
    this.heap.ints[this.#arrays.actions.address >> 2] = -1; // the first action enters nothing and leads nowhere
    this.#set(ACTIONS, 2);
    this.#set(MAX_STACK, LIMITS.stack);
    this.#set(MAX_HEADS, 32);
    /** The configuration of the empty text. */
    this.start = Int32Array.of(this.#run("state_of_list", null, this.tables.start), -1);
  }

  /** How much of its limits is used, from 0 to 1. */
  get fullness() {
    return Math.max(this.#get(STATES) / LIMITS.states, numBytes(this.#arrays) / LIMITS.bytes);
  }

  /** The configuration after these bytes; null if they may not come. @param {Config} config @param {Uint8Array} data */
  advance(config, data) {
    const text = this.scratch("text", this.maxTokenLen, 1, 1);
    this.heap.bytes.set(data, text.address);
    const row = this.#run("advance", config, 0, { ...text, rows: data.length });
    return row < 0 ? null : this.#config(row);
  }

  /** Whether the text may end here. @param {Config} config */
  isAccepting(config) {
    return this.#run("is_accepting", config) !== 0;
  }

  /** The forced bytes, as complete characters; only the first if all take too long. @param {Config} config @param {number} most */
  forcedRun(config, most) {
    const [out, classes] = [this.scratch("forced", most, 1, 1), this.scratch("classes", this.numClasses, 1, 1)];
    const keep = this.#get(FRAMES);
    let size = 0;
    try {
      size = this.#run("forced_run", config, LIMITS.steps - HINT_STEPS, this.onlyByte, out);
      this.heap.bytes.fill(0, classes.address, classes.address + this.numClasses);
      if (size) this.#run("possible_classes", this.#config(0), this.numClasses, classes);
    } finally {
      this.#forgetFrames(keep);
    }
    const data = this.heap.bytes.slice(out.address, out.address + size);
    const isInside = this.tables.classes.subarray(0x80, 0xc0).some((klass) => this.heap.bytes[classes.address + klass]);
    if (!size || !isInside) return data;
    while (size && data[size - 1] >= 0x80 && data[size - 1] < 0xc0) size--; // the last character is incomplete
    return data.slice(0, size && data[size - 1] >= 0xc0 ? size - 1 : size);
  }

  /** Sets the bits of the tokens of a trie that may come. @param {Config} config @param {import("./vocabulary.js").Trie} trie @param {Place} mask @returns {number} how many frames were read, from the top */
  walk(config, trie, mask) {
    const places = found(this.#made, trie, () => Object.values(trie).map((array) => this.heap.copy(array)));
    return this.#tried("walk", config, 0, ...places, mask)[1];
  }

  /** Names what the uppermost `depth` frames can mean to one token. @param {Config} config @param {number} depth */
  framesRead(config, depth) {
    const [top, [, frame]] = [this.#top(config), config];
    const nearLimit = this.#isNearLimit(top) ? top : -1;
    if (config.length > 2 || depth > MOST_CONTENTS) return `${nearLimit} ${config.filter((_, i) => i & 1)}`;
    let [contents, above] = [`${nearLimit}:`, frame];
    while (above >= 0 && this.#depth(above) > top - depth) {
      const [back, loop, count, sibling] = [RETURN, FRAME_LOOP, COUNT, SIBLING].map((i) => this.#frame(above, i));
      const mask = this.heap.longs[(this.#arrays.frames.address >> 3) + above * FRAME_COLUMNS + MASK];
      contents += [back, loop, mask, ...this.#countLeft(loop, count), sibling >= 0, ""];
      above = sibling >= 0 ? sibling : this.#frame(above, PARENT);
    }
    return depth > top ? `${contents}bottom` : contents;
  }

  /** Whether every text of at most `maxChars` of these characters may come, and how many frames were read to see it. @param {Config} config @param {Int16Array} chars @param {number} maxChars @returns {[boolean, number]} */
  acceptsAll(config, chars, maxChars) {
    const { starts, spelled, firsts, known } = this.#spelled(chars);
    const states = found(known, maxChars, () => new Map());
    const top = this.#top(config);
    // An answer for which no frame was read holds for this state in any stack that is not nearly full.
    const isLasting = config.length === 2 && !this.#isNearLimit(top);
    if (isLasting && states.has(config[0])) return [states.get(config[0]), 0];
    if (this.#isBarred(config, firsts)) return [false, 0];
    const { nodes, slots } = this.#nodes(CHAR_NODES);
    this.#set(FROZEN, maxChars);
    this.#set(FROZEN_DEPTH, top);
    this.#set(FAILED, 0);
    let [size, depth] = [0, 0];
    try {
      [size, depth] = this.#tried("accepts_all", config, 0, starts, spelled, nodes, slots);
    } finally {
      this.#set(FROZEN, 0);
    }
    if (isLasting && !depth) {
      states.set(config[0], size > 0);
      for (let i = 0, at = nodes.address >> 2; i < size; i++, at += nodes.columns) {
        const [inside, heads, state, frame] = this.heap.ints.subarray(at, at + 4);
        if (inside === 0 && heads === 1 && frame === config[1]) states.set(state, true);
      }
    }
    return [size > 0, depth];
  }

  /** The most characters, up to `most`, of which every text may come; whether no longer one may; how many frames were read. @param {Config} config @param {Int16Array} chars @param {number} most @returns {[number, boolean, number]} */
  textRoom(config, chars, most) {
    const { starts, spelled, firsts } = this.#spelled(chars);
    if (this.#isBarred(config, firsts)) return [0, false, 0];
    const { nodes, slots } = this.#nodes(ROOM_NODES);
    const [room, depth] = this.#tried("text_room", config, most, starts, spelled, nodes, slots);
    return [room >> 1, (room & 1) === 1, depth];
  }

  /** Whether the states alone show that a byte may not come. @param {Config} config @param {number} byte */
  isDead(config, byte) {
    const klass = this.tables.classes[byte];
    if (config.some((state, i) => !(i & 1) && this.#code(state, klass) === UNKNOWN)) this.#run("expand_heads", config);
    return config.every((state, i) => i & 1 || this.#code(state, klass) === DEAD);
  }

  /** An array that a question writes, and no later one reads. @param {string} name @param {number} rows @param {number} columns @param {number} itemBytes @returns {Place} */
  scratch(name, rows, columns, itemBytes) {
    return found(this.#made, name, () => this.heap.array(rows, columns, itemBytes));
  }

  /** The result of a kernel for a configuration. Arrays that are full are enlarged. @param {string} kernel @param {Config | null} config @param {number} value @param {Place[]} operands */
  #run(kernel, config, value = 0, ...operands) {
    this.#set(FUEL, LIMITS.steps);
    this.needsRoom = false;
    for (;;) {
      this.#set(FULL, -1);
      this.#set(CALLED, this.#get(CALLED) + 1);
      if (config) this.heap.ints.set([config.length / 2, ...config], this.#arrays.heads.address >> 2);
      const result = this.heap.call(kernel, this.t, this.m, value, operands);
      if (result !== STOPPED) return result;
      this.#makeRoom(this.#get(FULL));
    }
  }

  /** The result of a kernel, and how many open frames it read. Forgets the frames that it made. @param {string} kernel @param {Config} config @param {number} value @param {Place[]} operands @returns {[number, number]} */
  #tried(kernel, config, value, ...operands) {
    const keep = this.#get(FRAMES);
    this.#set(LOWEST, UNBOUNDED);
    try {
      const result = this.#run(kernel, config, value, ...operands);
      return [result, Math.max(0, this.#top(config) - this.#get(LOWEST) + 1)];
    } finally {
      this.#forgetFrames(keep);
    }
  }

  /** @param {number} which */
  #makeRoom(which) {
    const { states, heads } = this.#arrays;
    if (which === OUT_OF_FUEL) {
      throw new GrammarError(`finding what may come next took more than ${LIMITS.steps} steps; make the grammar less ambiguous`);
    }
    if (which === TOO_MUCH_WORK || (which === HEADS && heads.columns > 2 * LIMITS.heads)) {
      throw new GrammarError(`a text may be read in at most ${LIMITS.heads} ways at once, but this one can be read in more`);
    }
    this.needsRoom = true;
    const larger = Object.fromEntries(NAMES.map((name) => [name, { ...this.#arrays[name] }]));
    for (const name of GROWING[Math.min(which, DEPTHS)]) larger[name].rows *= which === HEADS ? 1 : 2;
    if (which === HEADS) larger.heads.columns = 2 * heads.columns - 1;
    if (which === STATES) larger.trans.rows = larger.states.rows = Math.min(larger.states.rows, LIMITS.states);
    larger.stateIndex.rows = slotsOf(larger.states.rows);
    larger.frameIndex.rows = slotsOf(larger.frames.rows);
    if ((which === STATES && states.rows === LIMITS.states) || numBytes(larger) > LIMITS.bytes) {
      throw new GrammarError(`a text may need at most ${LIMITS.states} states and ${LIMITS.bytes} bytes, but this one needs more`);
    }
    for (const name of NAMES) {
      const { address, rows, columns, itemBytes } = this.#arrays[name];
      if (rows === larger[name].rows && columns === larger[name].columns) continue;
      this.#place(name, larger[name].rows, larger[name].columns);
      if (which === ENTRIES) continue; // these are only a memo
      for (let row = 0; row < rows; row++) {
        const [from, to] = [columns, larger[name].columns].map((width) => row * width * itemBytes);
        this.heap.bytes.copyWithin(this.#arrays[name].address + to, address + from, address + from + columns * itemBytes);
      }
    }
    this.#set(MAX_HEADS, (this.#arrays.heads.columns - 1) / 2);
    if (which === ENTRIES) this.#set(ENTRIES, 0);
    this.#free("stateIndex");
    this.#free("frameIndex");
    this.heap.call("rebuild_indexes", this.t, this.m, 0, []);
  }

  /** Makes an array and tells kernels of it. @param {string} name @param {number} rows @param {number} columns */
  #place(name, rows, columns) {
    this.#arrays[name] = this.heap.array(rows, columns, /** @type {any} */ (ITEM_BYTES)[name]);
    this.heap.setField(this.m, NAMES.indexOf(name), this.#arrays[name]);
  }

  /** Writes -1 into all items. @param {string} name */
  #free(name) {
    const { address, rows, itemBytes } = this.#arrays[name];
    this.heap.bytes.fill(0xff, address, address + rows * itemBytes);
  }

  /** @param {number} keep */
  #forgetFrames(keep) {
    if (this.#get(FRAMES) > keep) this.heap.call("forget_frames", this.t, this.m, keep, []);
  }

  /** Whether no head can read one of these classes, as is already known. @param {Config} config @param {Int32Array} firsts */
  #isBarred(config, firsts) {
    return firsts.some((klass) => config.every((state, i) => i & 1 || this.#code(state, klass) === DEAD));
  }

  /** How far a count is from both bounds of its loop. Distances that no token can cross are equal. @param {number} loop @param {number} count */
  #countLeft(loop, count) {
    if (loop < 0) return [];
    const column = (/** @type {number} */ i) => Number(this.tables.loops[loop * LOOP_COLUMNS + i]);
    const least = Math.min(Math.max(column(LOOP_MIN) - count, 0), this.maxTokenLen + 2);
    const most = Math.min(column(LOOP_MAX) - count, this.maxTokenLen + 2 + column(LOOP_REQUIRED));
    return [least, column(LOOP_MAX) === UNBOUNDED ? -1 : most];
  }

  /** Whether a token that is read at this depth may exceed the limit of the stack. @param {number} depth */
  #isNearLimit(depth) {
    return depth + this.maxTokenLen * this.tables.maxPush > LIMITS.stack;
  }

  /** A set of characters in this grammar's classes of bytes, and the states for which `acceptsAll` is known. @param {Int16Array} chars */
  #spelled(chars) {
    return found(this.#made, chars, () => {
      const [starts, spelled] = [this.heap.array(chars.length / 256 + 1, 1, 4), this.heap.array(chars.length, 1, 4)];
      const given = { ...this.heap.copy(chars), rows: chars.length / 256, columns: 256 };
      spelled.rows = this.heap.call("spell", this.t, this.m, 0, [given, starts, spelled]);
      const at = spelled.address >> 2;
      const firsts = this.heap.ints.slice(at, at + this.heap.ints[(starts.address >> 2) + 1]).map((step) => step & 255);
      return { starts, spelled, firsts, known: new Map() };
    });
  }

  /** This many nodes for `acceptsAll` and `textRoom`, and the hash table of the nodes. @param {number} rows */
  #nodes(rows) {
    const columns = 2 + 2 * this.#get(MAX_HEADS);
    const nodes = this.scratch(`${rows} nodes of ${columns}`, rows, columns, 4);
    return { nodes, slots: this.scratch(`slots of ${rows}`, 2 * rows, 1, 4) };
  }

  /** The heads in a row. @param {number} row @returns {Config} */
  #config(row) {
    const at = (this.#arrays.heads.address >> 2) + row * this.#arrays.heads.columns;
    return this.heap.ints.slice(at + 1, at + 1 + 2 * this.heap.ints[at]);
  }

  /** The depth of the uppermost frame. @param {Config} config */
  #top(config) {
    return config.reduce((top, frame, i) => (i & 1 ? Math.max(top, this.#depth(frame)) : top), 0);
  }

  /** @param {number} frame */
  #depth(frame) {
    return frame >= 0 ? this.#frame(frame, DEPTH) : 0;
  }

  /** @param {number} frame @param {number} column */
  #frame(frame, column) {
    return this.heap.long(this.#arrays.frames.address + 8 * (frame * FRAME_COLUMNS + column));
  }

  /** @param {number} state @param {number} klass */
  #code(state, klass) {
    return this.heap.ints[(this.#arrays.trans.address >> 2) + state * this.numClasses + klass];
  }

  /** @param {number} counter */
  #get(counter) {
    return this.heap.long(this.#arrays.counters.address + 8 * counter);
  }

  /** @param {number} counter @param {number} value */
  #set(counter, value) {
    this.heap.setLong(this.#arrays.counters.address + 8 * counter, value);
  }
}

/** Slots of a hash table for this number of entries. @param {number} numEntries */
function slotsOf(numEntries) {
  return 2 ** Math.ceil(Math.log2(4 * numEntries));
}

/** @param {Record<string, Place>} arrays */
function numBytes(arrays) {
  return Object.values(arrays).reduce((sum, { rows, columns, itemBytes }) => sum + rows * columns * itemBytes, 0);
}

/** The value of a key, made if it is missing. @param {Map<any, any>} map @param {unknown} key @param {() => any} made */
function found(map, key, made) {
  if (!map.has(key)) map.set(key, made());
  return map.get(key);
}
