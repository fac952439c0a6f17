/** The memory that kernels see: a stack, and arrays above it. All grammars of a vocabulary share one. */

import * as py from "./dist/layout.js";

const STACK_BYTES = 1 << 16;
const PAGE_BYTES = 1 << 16;
const [MAX_ARRAYS, FIELD_BYTES] = [8, 24]; // a field of a record is an int, or an address and the lengths of two axes

/** An array of the heap. @typedef {{address: number, rows: number, columns: number, itemBytes: number}} Place */

export class Heap {
  #memory = new WebAssembly.Memory({ initial: 256 });
  #end = STACK_BYTES;
  /** Addresses of blocks that are free, by their size. @type {Map<number, number[]>} */
  free = new Map();
  /** @type {Map<string, Place>} */
  #scratch = new Map();

  /** @param {WebAssembly.Module} module */
  constructor(module) {
    const stack = new WebAssembly.Global({ value: "i32", mutable: true }, STACK_BYTES);
    const env = { __linear_memory: this.#memory, __stack_pointer: stack };
    this.run = new WebAssembly.Instance(module, { env }).exports.run;
    this.#see();
    this.shared = new Region(this);
    this.operands = this.shared.array(MAX_ARRAYS, 1, FIELD_BYTES).address;
  }

  /** The result of a kernel. @param {number} t @param {number} m @param {string} kernel @param {number} value @param {Place[]} operands @returns {number} */
  call(t, m, kernel, value, operands) {
    for (let i = 0; i < operands.length; i++) this.setField(this.operands, i, operands[i]);
    return this.run(py.KERNELS[kernel], t, m, value, this.operands);
  }

  /** @param {number} record @param {number} number @param {Place | number} field */
  setField(record, number, field) {
    const { address, rows, columns } = typeof field === "number" ? { address: field, rows: 0, columns: 0 } : field;
    const at = (record + number * FIELD_BYTES) >> 2; // words have 64 bits, of which the upper half stays 0
    [this.ints[at], this.ints[at + 2], this.ints[at + 4]] = [address, rows, columns];
  }

  /** An array that a question writes, and no later one reads. @param {string} name @param {number} rows @param {number} columns @param {number} itemBytes */
  scratch(name, rows, columns, itemBytes) {
    return found(this.#scratch, name, () => this.shared.array(rows, columns, itemBytes));
  }

  /** The items of an array, until the heap grows. @param {Place} place @param {any} type */
  view({ address, rows, columns }, type) {
    return new type(this.#memory.buffer, address, rows * columns);
  }

  /** The address of a block of zeros. @param {number} size bytes, a power of two */
  take(size) {
    const known = this.free.get(size)?.pop();
    if (known !== undefined) this.bytes.fill(0, known, known + size);
    if (known !== undefined) return known;
    this.#end += size;
    const missing = this.#end - this.bytes.length;
    if (missing > 0) this.#memory.grow(Math.ceil(Math.max(missing, this.bytes.length / 4) / PAGE_BYTES));
    if (missing > 0) this.#see();
    return this.#end - size;
  }

  #see() {
    [this.bytes, this.ints] = [new Uint8Array(this.#memory.buffer), new Int32Array(this.#memory.buffer)];
    this.longs = new BigInt64Array(this.#memory.buffer);
  }
}

/** Arrays that are given up together. */
export class Region {
  /** Sizes of blocks by their address. @type {Map<number, number>} */
  #blocks = new Map();
  numBytes = 0;

  /** @param {Heap} heap */
  constructor(heap) {
    this.heap = heap;
  }

  /** A new array of zeros. @param {number} rows @param {number} columns @param {number} itemBytes @returns {Place} */
  array(rows, columns, itemBytes) {
    const size = 2 ** Math.max(Math.ceil(Math.log2(rows * columns * itemBytes)), 3);
    const address = this.heap.take(size);
    this.#blocks.set(address, size);
    this.numBytes += size;
    return { address, rows, columns, itemBytes };
  }

  /** Gives an array up. @param {{address: number}} array */
  drop({ address }) {
    const size = this.#blocks.get(address);
    found(this.heap.free, size, () => []).push(address);
    this.#blocks.delete(address);
    this.numBytes -= size;
  }

  /** A copy as a vector. @param {any} given a typed array */
  copy(given) {
    const made = this.array(given.length, 1, given.BYTES_PER_ELEMENT);
    this.heap.bytes.set(new Uint8Array(given.buffer, given.byteOffset, given.byteLength), made.address);
    return made;
  }

  /** The address of a record. @param {(Place | number)[]} fields */
  record(fields) {
    const { address } = this.array(fields.length, 1, FIELD_BYTES);
    fields.forEach((field, i) => this.heap.setField(address, i, field));
    return address;
  }

  clear() {
    for (const address of this.#blocks.keys()) this.drop({ address });
  }
}

/** The value of a key, made if it is missing. @template K, V @param {Map<K, V>} map @param {K} key @param {() => V} made @returns {V} */
export function found(map, key, made) {
  if (!map.has(key)) map.set(key, made());
  return map.get(key);
}
