/** The files that jsg exports (`jsg/constrained/files.py`). Kernels check no index, so everything is checked here. */

import * as py from "./dist/layout.js";

const HEADER_BYTES = 56; // kind, version, digest
const TYPES = { uint8: Uint8Array, int32: Int32Array, int64: BigInt64Array };

/** An array of a file, and where it begins. @typedef {{at: number, rows: number, columns: number, data: any}} Given */
/** @typedef {Record<string, Given>} Arrays */

/** What a file is not and must be, or what a grammar asks for and cannot have. */
export class GrammarError extends Error {
  name = "GrammarError";
}

/** The bytes of a file, and its arrays. @param {Uint8Array | ArrayBuffer} file @param {any} form */
async function read(file, form) {
  const bytes = new Uint8Array(file instanceof ArrayBuffer ? file.slice(0) : file); // a copy, which nobody changes
  const kind = new TextDecoder("latin1").decode(bytes.subarray(0, 16));
  if (kind !== form.kind.padEnd(16, "\0") || bytes.length < HEADER_BYTES) {
    throw new GrammarError(`${form.what} must begin with "${form.kind}", but this begins with ${JSON.stringify(kind)}`);
  }
  const view = new DataView(bytes.buffer);
  const long = (at) => Number(view.getBigInt64(at, true));
  if (long(16) !== form.version) {
    throw new GrammarError(`${form.what} must be of version ${form.version}, but this is of version ${long(16)}`);
  }
  if (!globalThis.crypto?.subtle) throw new GrammarError("a page must come over HTTPS or from localhost to check digests");
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes.subarray(HEADER_BYTES)));
  check(form, digest.every((byte, i) => byte === bytes[24 + i]));
  const arrays = {};
  let end = HEADER_BYTES;
  for (const [name, type, axes] of form.arrays) {
    check(form, end + 16 <= bytes.length);
    const [at, rows, columns, Type] = [end + 16, long(end), long(end + 8), TYPES[type]];
    end = at + Math.ceil((rows * columns * Type.BYTES_PER_ELEMENT) / 8) * 8;
    check(form, rows >= 0 && columns >= 0 && end <= bytes.length && (columns === 1 || axes === 2));
    arrays[name] = { at, rows, columns, data: new Type(bytes.buffer, at, rows * columns) };
  }
  check(form, end === bytes.length);
  return { bytes, arrays };
}

/** A compiled grammar (`tables.py`). @param {Uint8Array | ArrayBuffer} file */
export async function readTables(file) {
  const { bytes, arrays } = await read(file, py.GRAMMAR);
  const { numbers, classes, sets, positions, list_start, list_items, loops, branches, rule_ends } = arrays;
  const [start, numRules, maxPush] = Array.from(numbers.data, Number);
  const [starts, numLists] = [list_start.data, list_start.rows - 1];
  const bounds = [1, numLists, loops.rows, 1, branches.rows, loops.rows, 1]; // of the argument of each kind of position
  const shapes = [numbers.rows, classes.rows, positions.columns, loops.columns, branches.columns, rule_ends.rows];
  check(py.GRAMMAR, shapes.join() === `3,256,4,10,2,${numLists}` && sets.columns <= 256);
  check(py.GRAMMAR, start >= 0 && start < numLists);
  const levels = numRules + branches.rows + loops.rows + 1;
  check(py.GRAMMAR, numRules >= rule_ends.data.filter(Boolean).length && numRules <= positions.rows);
  check(py.GRAMMAR, maxPush >= 0 && maxPush <= positions.rows && positions.data[py.KIND] === py.END_RULE);
  check(py.GRAMMAR, starts[0] === 0 && starts[numLists] === list_items.rows);
  for (const [array, column, bound] of [
    [classes, 0, sets.columns], [list_items, 0, positions.rows], [rule_ends, 0, positions.rows],
    [positions, py.KIND, bounds.length], [positions, py.SET, sets.rows], [positions, py.FOLLOW, numLists],
    [branches, py.BRANCH_LIST, numLists], [loops, py.BRANCHES, branches.rows], [loops, py.BRANCHES_END, branches.rows + 1],
    [loops, py.SEPARATOR_KIND, 3], [loops, py.FIRST_END, positions.rows],
  ]) check(py.GRAMMAR, isWithin(array, column, bound));
  for (let i = 0; i < numLists; i++) check(py.GRAMMAR, starts[i] <= starts[i + 1]);
  let numEnds = 0;
  for (let i = 0; i < positions.data.length; i += 4) {
    const [kind, argument] = positions.data.subarray(i + py.KIND, i + py.ARGUMENT + 1);
    check(py.GRAMMAR, argument >= 0 && argument < bounds[kind]);
    numEnds += Number(kind >= py.END_RULE && kind <= py.END_SEPARATOR);
  }
  check(py.GRAMMAR, numEnds <= levels);
  for (let i = 0; i < loops.data.length; i += 10) {
    const loop = Array.from(loops.data.subarray(i, i + 10), Number);
    const [size, separator] = [loop[py.BRANCHES_END] - loop[py.BRANCHES], loop[py.SEPARATOR]];
    check(py.GRAMMAR, size > 0 && loop[py.FIRST_END] + size < positions.rows);
    check(py.GRAMMAR, loop[py.SEPARATOR_KIND] === py.NO_SEPARATOR || (separator >= 0 && separator < numLists));
  }
  return { bytes, arrays, start, numRules, maxPush, levels };
}

/** The tokens of a model (`vocab.py`). @param {Uint8Array | ArrayBuffer} file */
export async function readVocabulary(file) {
  const { size, eos_ids, ids, text_start, texts } = (await read(file, py.VOCABULARY)).arrays;
  const [numRows, start] = [Number(size.data[0]), text_start.data];
  check(py.VOCABULARY, numRows > 0 && numRows < 2 ** 31 && isWithin(ids, 0, numRows) && isWithin(eos_ids, 0, numRows));
  check(py.VOCABULARY, start.length === ids.rows + 1 && start[0] === 0 && start[ids.rows] === texts.rows);
  for (let i = 0; i < ids.rows; i++) {
    check(py.VOCABULARY, start[i] < start[i + 1] && start[i + 1] - start[i] <= py.MAX_TOKEN_BYTES);
  }
  return { size: numRows, eosIds: eos_ids.data, ids: ids.data, start, texts: texts.data };
}

/** Whether all numbers of a column are in [0, bound). @param {Given} array @param {number} column @param {number} bound */
function isWithin({ data, columns }, column, bound) {
  for (let i = column; i < data.length; i += columns) if (data[i] < 0 || data[i] >= bound) return false;
  return true;
}

/** @param {{what: string}} form @param {boolean} isSound */
function check({ what }, isSound) {
  if (!isSound) throw new GrammarError(`the bytes of ${what} are damaged; export it again`);
}
