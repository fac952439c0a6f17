/** The memory that kernels see: a stack, and above it arrays that are made one after another and given up together. */

const STACK_BYTES = 1 << 16;
const PAGE_BYTES = 1 << 16;
const MAX_ARRAYS = 8;
/** Bytes of a field of a record: an int, or the address of an array and the lengths of its axes. */
const FIELD_BYTES = 24;

/** @typedef {import("./files.js").Place} Place */

export class Heap {
  #memory = new WebAssembly.Memory({ initial: 2 });
  /** @type {Record<string, (t: number, m: number, value: number, operands: number) => number>} */
  #kernels;
  #operands;
  /** @param {WebAssembly.Module} module */
  constructor(module) {
    const stack = new WebAssembly.Global({ value: "i32", mutable: true }, STACK_BYTES);
    const env = { __linear_memory: this.#memory, __stack_pointer: stack };
    this.#kernels = /** @type {any} */ (new WebAssembly.Instance(module, { env }).exports);
    this.end = STACK_BYTES;
    this.#see();
    this.#operands = this.allocate(MAX_ARRAYS * FIELD_BYTES);
  }

  /** Room that is zero; its address is a multiple of 8. @param {number} numBytes */
  allocate(numBytes) {
    const address = this.end;
    this.end += (numBytes + 7) & ~7;
    const missing = this.end - this.bytes.length;
    if (missing > 0) {
      this.#memory.grow(Math.ceil(Math.max(missing, this.bytes.length / 2) / PAGE_BYTES));
      this.#see();
    }
    return address;
  }

  /** Gives up all that was made since `end` was this. @param {number} end */
  release(end) {
    this.bytes.fill(0, end, this.end);
    this.end = end;
  }

  /** A new array. @param {number} rows @param {number} columns @param {number} itemBytes @returns {Place} */
  array(rows, columns, itemBytes) {
    return { address: this.allocate(rows * columns * itemBytes), rows, columns, itemBytes };
  }

  /** A copy of an array as a vector. @param {ArrayBufferView & {length: number, BYTES_PER_ELEMENT: number}} given */
  copy(given) {
    const made = this.array(given.length, 1, given.BYTES_PER_ELEMENT);
    this.bytes.set(new Uint8Array(given.buffer, given.byteOffset, given.byteLength), made.address);
    return made;
  }

  /** A record of arrays and ints, for `call`. @param {(Place | number)[]} fields */
  record(fields) {
    const address = this.allocate(fields.length * FIELD_BYTES);
    fields.forEach((field, i) => this.setField(address, i, field));
    return address;
  }

  /** @param {number} record @param {number} number @param {Place | number} field */
  setField(record, number, field) {
    const at = (record + number * FIELD_BYTES) >> 2;
    const [first, second, third] = typeof field === "number" ? [field, 0, 0] : [field.address, field.rows, field.columns];
    this.ints[at] = first; // the upper halves of these words stay 0
    this.ints[at + 2] = second;
    this.ints[at + 4] = third;
  }

  /** The result of a kernel. @param {string} kernel @param {number} t @param {number} m @param {number} value @param {Place[]} operands */
  call(kernel, t, m, value, operands) {
    for (let i = 0; i < operands.length; i++) this.setField(this.#operands, i, operands[i]);
    return this.#kernels[kernel](t, m, value, this.#operands);
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

  #see() {
    this.bytes = new Uint8Array(this.#memory.buffer);
    this.ints = new Int32Array(this.#memory.buffer);
    this.longs = new BigInt64Array(this.#memory.buffer);
  }
}
