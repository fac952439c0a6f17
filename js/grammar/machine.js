/** The machine of a grammar (`jsg/constrained/run/machine.py` and `memory.py`): it calls kernels and gives them room. */

import * as py from "./dist/layout.js";
import { GrammarError } from "./files.js";
import { Region, found } from "./heap.js";

/** @typedef {import("./heap.js").Place} Place */
/** The state and the frame of each way to read a text, in pairs; frame -1 is the bottom. @typedef {Int32Array} Config */

const { states: MAX_STATES, stack: STACK, heads: HEADS, machine_bytes: MAX_BYTES, mask_steps: STEPS } = py.LIMITS;
const UNBOUNDED = BigInt(py.UNBOUNDED);
const NAMES = Object.keys(py.MEMORY);
/** The arrays that are enlarged when a kernel calls one full. */
const GROWING = [["trans", "states"], ["members"], ["actions"], ["frames"], ["entries"], ["heads"], ["heads"]];
/** Frees what machines made that nobody has any more. @type {FinalizationRegistry<Region[]>} */
const dropped = new FinalizationRegistry((regions) => regions.forEach((region) => region.clear()));

export class Machine {
  /** @type {Record<string, Place>} */
  #arrays = {};
  /** Sets of characters in this grammar's classes of bytes. @type {Map<Int16Array, any>} */
  #spellings = new Map();

  /** @param {import("./heap.js").Heap} heap @param {Awaited<ReturnType<import("./files.js").readTables>>} tables @param {number} maxTokenLen bytes of the longest token */
  constructor(heap, tables, maxTokenLen) {
    [this.heap, this.tables, this.maxTokenLen, this.memory] = [heap, tables, maxTokenLen, new Region(heap)];
    const { numbers, ...given } = tables.arrays;
    const fixed = new Region(heap);
    dropped.register(this, [fixed, this.memory]);
    const base = fixed.copy(tables.bytes).address;
    const arrays = Object.values(given).map(({ at, rows, columns }) => ({ address: base + at, rows, columns, itemBytes: 0 }));
    this.t = fixed.record([...arrays, tables.start, tables.numRules, tables.maxPush]);
    this.m = fixed.record(NAMES.map(() => 0));
    [this.classes, this.loops, this.numClasses] = [given.classes.data, given.loops.data, given.sets.columns];
    const onlyByte = (_, klass) =>
      this.classes.indexOf(klass) === this.classes.lastIndexOf(klass) ? this.classes.indexOf(klass) : -1;
    this.onlyByte = fixed.copy(Int16Array.from({ length: this.numClasses }, onlyByte));
    this.clear();
  }

  /** Forgets all states and frames, so that all configurations become invalid. */
  clear() {
    this.memory.clear();
    this.#spellings.clear();
    this.#arrays = {};
    const { arrays: { positions, list_start }, levels } = this.tables;
    const shapes = { // rows, columns, what is in them
      trans: [128, this.numClasses], states: [128, 4], members: [1024 + positions.rows], actions: [1024], frames: [128, 8],
      state_index: [slotsOf(128), 1, -1], frame_index: [slotsOf(128), 1, -1], entries: [64, 4],
      list_state: [list_start.rows - 1, 1, -1], marks: [positions.rows], gather: [positions.rows],
      work: [py.MAX_WORK + levels, 2], ended: [py._ENDED, 5 + 2 * py.MOST_KEPT], heads: [py._ROWS, 1 + 2 * py._HEADS],
      counters: [py.NUM_COUNTERS],
    };
    for (const [name, [rows, columns, item]] of Object.entries(shapes)) this.#place(name, rows, columns, item);
    this.heap.ints[this.#arrays.actions.address >> 2] = -1; // the first action enters nothing and leads nowhere
    this.#set(py.ACTIONS, 2);
    this.#set(py.MAX_STACK, STACK);
    this.#set(py.MAX_HEADS, py._HEADS);
    this.refuel();
    /** The configuration of the empty text. */
    this.start = Int32Array.of(this.#run("state_of_list", null, this.tables.start), -1);
  }

  /** How much of its limits is used, from 0 to 1. Blocks are up to twice as long as their arrays. */
  get fullness() {
    return Math.max(this.#get(py.STATES) / MAX_STATES, this.memory.numBytes / (2 * MAX_BYTES));
  }

  /** Lets the questions until the next call take the steps of one mask together. */
  refuel() {
    this.#set(py.FUEL, STEPS);
    this.#set(py.FROZEN, 0);
  }

  /** @param {number} numSteps */
  #spend(numSteps) {
    this.#set(py.FUEL, this.#get(py.FUEL) - numSteps);
  }

  /** The configuration after these bytes; null if they may not come. @param {Config} config @param {Uint8Array} data */
  advance(config, data) {
    const text = this.heap.scratch("text", this.maxTokenLen, 1, 1);
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
    const [out, classes] = [this.heap.scratch("forced", most, 1, 1), this.heap.scratch("classes", 256, 1, 1)];
    this.heap.bytes.fill(0, classes.address, classes.address + 256);
    let size = this.#trying(() => {
      const length = this.#run("forced_run", config, STEPS - py._HINT_STEPS, this.onlyByte, out);
      if (length) this.#run("possible_classes", this.#config(0), this.numClasses, classes);
      return length;
    });
    const data = this.heap.bytes.slice(out.address, out.address + size);
    const isPossible = (klass) => this.heap.bytes[classes.address + klass] !== 0;
    if (!size || !this.classes.subarray(0x80, 0xc0).some(isPossible)) return data;
    while (size && data[size - 1] >= 0x80 && data[size - 1] < 0xc0) size--; // the last character is incomplete
    return data.slice(0, size && data[size - 1] >= 0xc0 ? size - 1 : size);
  }

  /** Sets the bits of the tokens of a trie that may come. @param {Config} config @param {Place[]} trie @param {Place} mask @returns {number} how many frames were read, from the top */
  walk(config, trie, mask) {
    return this.#tried("walk", config, 0, ...trie, mask)[1];
  }

  /** Names what the uppermost `depth` frames can mean to one token. @param {Config} config @param {number} depth */
  framesRead(config, depth) {
    const top = this.#top(config);
    const nearLimit = this.#isNearLimit(top) ? top : -1;
    if (config.length > 2 || depth > py._MOST_CONTENTS) return `${nearLimit} ${config.filter((_, i) => i & 1)}`;
    const far = this.maxTokenLen + 2;
    let [contents, frame] = [`${nearLimit}:`, config[1]];
    while (frame >= 0 && this.#depth(frame) > top - depth) {
      const at = (this.#arrays.frames.address >> 3) + 8 * frame;
      const [parent, back, loop, count, mask, sibling] = this.heap.longs.subarray(at, at + 6);
      contents += `${back},${loop},${mask},${sibling < 0} `;
      if (loop >= 0) {
        // How far the count is from both bounds of the loop. Distances that no token can cross are equal.
        const [least, most, , required] = this.loops.subarray(10 * Number(loop), 10 * Number(loop) + 4);
        const lacking = Math.min(Math.max(Number(least - count), 0), far);
        contents += `${lacking},${most === UNBOUNDED ? -1 : Math.min(Number(most - count), far + Number(required))};`;
      }
      frame = Number(sibling < 0 ? parent : sibling);
      this.#spend(py._STEPS_PER_FRAME);
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
    const { nodes, slots } = this.#nodes(py._CHAR_NODES);
    this.#set(py.FROZEN, maxChars); // until `refuel`, where the question is refused
    this.#set(py.FROZEN_DEPTH, top);
    this.#set(py.FAILED, 0);
    const [size, depth] = this.#tried("accepts_all", config, 0, starts, spelled, nodes, slots);
    this.#set(py.FROZEN, 0);
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
    const { nodes, slots } = this.#nodes(py._ROOM_NODES);
    const [room, depth] = this.#tried("text_room", config, most, starts, spelled, nodes, slots);
    return [room >> 1, (room & 1) === 1, depth];
  }

  /** Whether the states alone show that a byte may not come. @param {Config} config @param {number} byte */
  isDead(config, byte) {
    const klass = this.classes[byte];
    if (config.some((state, i) => !(i & 1) && this.#code(state, klass) === py.UNKNOWN)) this.#run("expand_heads", config);
    return this.#isBarred(config, [klass]);
  }

  /** The result of a kernel for a configuration. Arrays that are full are enlarged. @param {string} kernel @param {Config | null} config @param {number} value @param {Place[]} operands */
  #run(kernel, config, value = 0, ...operands) {
    for (;;) {
      this.#set(py.FULL, -1);
      this.#set(py.CALLED, this.#get(py.CALLED) + 1);
      if (config) this.heap.ints.set([config.length / 2, ...config], this.#arrays.heads.address >> 2);
      const result = this.heap.call(this.t, this.m, kernel, value, operands);
      if (result !== py.STOPPED) return result;
      this.#makeRoom(this.#get(py.FULL));
    }
  }

  /** The result of a kernel, and how many open frames it read. @param {string} kernel @param {Config} config @param {number} value @param {Place[]} operands @returns {[number, number]} */
  #tried(kernel, config, value, ...operands) {
    this.#set(py.LOWEST, py.UNBOUNDED);
    const result = this.#trying(() => this.#run(kernel, config, value, ...operands));
    return [result, Math.max(0, this.#top(config) - this.#get(py.LOWEST) + 1)];
  }

  /** The result of a question whose frames are forgotten. @param {() => number} ask */
  #trying(ask) {
    const keep = this.#get(py.FRAMES);
    try {
      return ask();
    } finally {
      if (this.#get(py.FRAMES) > keep) this.heap.call(this.t, this.m, "forget_frames", keep, []);
    }
  }

  /** @param {number} which */
  #makeRoom(which) {
    const { states, heads } = this.#arrays;
    if (which === py.OUT_OF_FUEL) throw new GrammarError(`finding what may come next took more than ${STEPS} steps`);
    if (which === py.TOO_MUCH_WORK || (which === py.HEADS && heads.columns > 2 * HEADS)) {
      throw new GrammarError(`a text may be read in at most ${HEADS} ways at once, but this one can be read in more`);
    }
    if ((which === py.STATES && states.rows === MAX_STATES) || this.fullness > 1) {
      throw new GrammarError(`a text may need at most ${MAX_STATES} states and ${MAX_BYTES} bytes, but this one needs more`);
    }
    for (const name of GROWING[which]) {
      const old = this.#arrays[name];
      if (which === py.HEADS) this.#place(name, old.rows, 2 * old.columns - 1);
      else this.#place(name, which === py.STATES ? Math.min(2 * old.rows, MAX_STATES) : 2 * old.rows, old.columns);
      const [width, wide] = [old.columns * old.itemBytes, this.#arrays[name].columns * old.itemBytes];
      for (let row = 0; row < old.rows && which !== py.ENTRIES; row++) { // entries are only a memo
        const begin = old.address + row * width;
        this.heap.bytes.copyWithin(this.#arrays[name].address + row * wide, begin, begin + width);
      }
    }
    if (which === py.HEADS) this.#set(py.MAX_HEADS, (this.#arrays.heads.columns - 1) / 2);
    if (which === py.ENTRIES) this.#set(py.ENTRIES, 0);
    this.#place("state_index", slotsOf(this.#arrays.states.rows), 1, -1);
    this.#place("frame_index", slotsOf(this.#arrays.frames.rows), 1, -1);
    this.heap.call(this.t, this.m, "rebuild_indexes", 0, []);
  }

  /** Makes an array and tells kernels of it. The one before it is free for arrays that are made later. @param {string} name @param {number} rows @param {number} columns @param {number} item */
  #place(name, rows, columns = 1, item = 0) {
    const [old, made] = [this.#arrays[name], this.memory.array(rows, columns, py.MEMORY[name])];
    if (item) this.heap.view(made, Int32Array).fill(item);
    this.heap.setField(this.m, NAMES.indexOf(name), (this.#arrays[name] = made));
    if (!old) return;
    const added = made.rows * made.columns - old.rows * old.columns;
    this.#spend(Math.floor((added * old.itemBytes) / py._BYTES_PER_STEP));
    this.memory.drop(old);
  }

  /** Whether no head can read one of these classes, as is already known. @param {Config} config @param {number[]} classes */
  #isBarred(config, classes) {
    return classes.some((klass) => config.every((state, i) => i & 1 || this.#code(state, klass) === py.DEAD));
  }

  /** Whether a token that is read at this depth may exceed the limit of the stack. @param {number} depth */
  #isNearLimit(depth) {
    return depth + this.maxTokenLen * this.tables.maxPush > STACK;
  }

  /** A set of characters in this grammar's classes of bytes, and the states for which `acceptsAll` is known. @param {Int16Array} chars */
  #spelled(chars) {
    return found(this.#spellings, chars, () => {
      const [starts, spelled] = [this.memory.array(chars.length / 256 + 1, 1, 4), this.memory.array(chars.length, 1, 4)];
      const given = { ...this.memory.copy(chars), rows: chars.length / 256, columns: 256 };
      spelled.rows = this.heap.call(this.t, this.m, "spell", 0, [given, starts, spelled]);
      const numFirsts = this.heap.view(starts, Int32Array)[1];
      const firsts = Array.from(this.heap.view(spelled, Int32Array).subarray(0, numFirsts), (step) => step & 255);
      return { starts, spelled, firsts, known: new Map() };
    });
  }

  /** This many nodes for `acceptsAll` and `textRoom`, and the hash table of the nodes. @param {number} rows */
  #nodes(rows) {
    const columns = 2 + 2 * this.#get(py.MAX_HEADS);
    const nodes = this.heap.scratch(`${rows} nodes of ${columns}`, rows, columns, 4);
    return { nodes, slots: this.heap.scratch(`slots of ${rows}`, 2 * rows, 1, 4) };
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
    return frame < 0 ? 0 : Number(this.heap.longs[(this.#arrays.frames.address >> 3) + 8 * frame + py.DEPTH]);
  }

  /** @param {number} state @param {number} klass */
  #code(state, klass) {
    return this.heap.ints[(this.#arrays.trans.address >> 2) + state * this.numClasses + klass];
  }

  /** @param {number} counter */
  #get(counter) {
    return Number(this.heap.longs[(this.#arrays.counters.address >> 3) + counter]);
  }

  /** @param {number} counter @param {number} value */
  #set(counter, value) {
    this.heap.longs[(this.#arrays.counters.address >> 3) + counter] = BigInt(value);
  }
}

/** Slots of a hash table for this number of entries. @param {number} numEntries */
function slotsOf(numEntries) {
  return 2 ** Math.ceil(Math.log2(py._INDEX_SLOTS * numEntries));
}
