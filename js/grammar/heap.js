/** The memory that kernels see: a stack, and arrays above it. All grammars of a vocabulary share one. */

const STACK_BYTES = 1 << 16;
const PAGE_BYTES = 1 << 16;
const [MAX_ARRAYS, FIELD_BYTES] = [8, 24]; // a field of a record is an int, or an address and the lengths of two axes

/** An array of the heap. @typedef {{address: number, rows: number, columns: number, itemBytes: number}} Place */

export class Heap {
  #memory = new WebAssembly.Memory({ initial: 2 });
  #end = STACK_BYTES;
  /** Addresses of blocks that are free, by their size. @type {Map<number, number[]>} */
  #free = new Map();
  /** @type {Map<string, Place>} */
  #scratch = new Map();

  /** @param {WebAssembly.Module} module */
  constructor(module) {
    const stack = new WebAssembly.Global({ value: "i32", mutable: true }, STACK_BYTES);
    const env = { __linear_memory: this.#memory, __stack_pointer: stack };
    /** @type {any} */
    this.kernels = new WebAssembly.Instance(module, { env }).exports;
    this.see();
    this.shared = new Region(this);
    this.operands = this.shared.array(MAX_ARRAYS, 1, FIELD_BYTES).address;
  }

  /** The address of a block of this many bytes, a power of two; all are zero. @param {number} size */
  take(size) {
    const known = this.#free.get(size)?.pop();
    if (known !== undefined) {
      this.bytes.fill(0, known, known + size);
      return known;
    }
    this.#end += size;
    const missing = this.#end - this.bytes.length;
    if (missing > 0) this.#memory.grow(Math.ceil(Math.max(missing, this.bytes.length / 4) / PAGE_BYTES));
    if (missing > 0) this.see();
    return this.#end - size;
  }

  /** @param {number} address @param {number} size */
  give(address, size) {
    const addresses = this.#free.get(size) ?? [];
    this.#free.set(size, addresses);
    addresses.push(address);
  }

  /** An array that a question writes, and no later one reads. @param {string} name @param {number} rows @param {number} columns @param {number} itemBytes */
  scratch(name, rows, columns, itemBytes) {
    const place = this.#scratch.get(name) ?? this.shared.array(rows, columns, itemBytes);
    this.#scratch.set(name, place);
    return place;
  }

  /** @param {number} record @param {number} number @param {Place | number} field */
  setField(record, number, field) {
    const at = (record + number * FIELD_BYTES) >> 2; // words have 64 bits, and their upper halves stay 0
    this.ints[at] = typeof field === "number" ? field : field.address;
    this.ints[at + 2] = typeof field === "number" ? 0 : field.rows;
    this.ints[at + 4] = typeof field === "number" ? 0 : field.columns;
  }

  /** An int of 64 bits, exact up to 2^53. @param {number} address */
  long(address) {
    return (this.ints[address >> 2] >>> 0) + this.ints[(address >> 2) + 1] * 2 ** 32;
  }

  /** @param {number} address @param {number} value */
  setLong(address, value) {
    this.ints[address >> 2] = value;
    this.ints[(address >> 2) + 1] = Math.floor(value / 2 ** 32);
  }

  /** The items of an array, until the heap grows. @param {Place} place @param {any} type */
  view({ address, rows, columns }, type) {
    return new type(this.#memory.buffer, address, rows * columns);
  }

  see() {
    this.bytes = new Uint8Array(this.#memory.buffer);
    this.ints = new Int32Array(this.#memory.buffer);
  }
}

/** Arrays that are given up together. */
export class Region {
  /** @type {[number, number][]} */
  #blocks = [];

  /** @param {Heap} heap */
  constructor(heap) {
    this.heap = heap;
  }

  /** A new array of zeros. @param {number} rows @param {number} columns @param {number} itemBytes @returns {Place} */
  array(rows, columns, itemBytes) {
    const size = 2 ** Math.max(Math.ceil(Math.log2(rows * columns * itemBytes)), 3);
    const address = this.heap.take(size);
    this.#blocks.push([address, size]);
    return { address, rows, columns, itemBytes };
  }

  /** @param {{length: number, buffer: ArrayBufferLike, byteOffset: number, byteLength: number, BYTES_PER_ELEMENT: number}} given */
  copy(given) {
    const made = this.array(given.length, 1, given.BYTES_PER_ELEMENT);
    this.heap.bytes.set(new Uint8Array(given.buffer, given.byteOffset, given.byteLength), made.address);
    return made;
  }

  /** The address of a record of arrays and ints. @param {(Place | number)[]} fields */
  record(fields) {
    const { address } = this.array(fields.length, 1, FIELD_BYTES);
    fields.forEach((field, i) => this.heap.setField(address, i, field));
    return address;
  }

  clear() {
    for (const [address, size] of this.#blocks) this.heap.give(address, size);
    this.#blocks.length = 0;
  }
}
