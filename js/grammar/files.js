/** The files that jsg exports (`jsg/constrained/files.py`). Kernels check no index, so everything is checked here. */

/** An array of a file, and where it begins. @typedef {{at: number, rows: number, columns: number, data: any}} Given */
/** @typedef {{kind: string, version: number, what: string, arrays: [string, any][]}} Form */

/** @type {Form} */
const GRAMMAR = {
  kind: "jsg.grammar",
  version: 4,
  what: "a compiled grammar",
  arrays: [
    ["numbers", BigInt64Array], ["classes", Uint8Array], ["sets", Uint8Array], ["positions", Int32Array],
    ["listStart", Int32Array], ["listItems", Int32Array], ["loops", BigInt64Array], ["branches", BigInt64Array],
    ["ruleEnds", Int32Array],
  ],
};
/** @type {Form} */
const VOCABULARY = {
  kind: "jsg.vocabulary",
  version: 1,
  what: "a vocabulary",
  arrays: [
    ["size", BigInt64Array], ["eosIds", Int32Array], ["ids", Int32Array], ["textStart", Int32Array], ["texts", Uint8Array],
  ],
};
const [KIND_BYTES, DIGEST_AT, HEADER_BYTES, SHAPE_BYTES] = [16, 24, 56, 16];
const [KIND, ARGUMENT, SET, FOLLOW, END_RULE] = [0, 1, 2, 3, 3];
const [BRANCHES, BRANCHES_END, SEPARATOR_KIND, FIRST_END, NO_SEPARATOR] = [4, 5, 7, 9, 0];
const MAX_TOKEN_BYTES = 65_535;

/** What a file, or what a grammar asks for, must be and is not. */
export class GrammarError extends Error {
  name = "GrammarError";
}

/** The arrays of a file by name, and its bytes. @param {Uint8Array | ArrayBuffer} file @param {Form} form */
async function read(file, { kind, version, what, arrays }) {
  const bytes = new Uint8Array(file).slice(); // nobody changes this copy, and it begins at a multiple of 8
  const view = new DataView(bytes.buffer);
  const begin = new TextDecoder("latin1").decode(bytes.subarray(0, KIND_BYTES));
  if (begin !== kind.padEnd(KIND_BYTES, "\0") || bytes.length < HEADER_BYTES) {
    throw new GrammarError(`${what} must begin with "${kind}", but this begins with ${JSON.stringify(begin)}`);
  }
  const found = view.getBigInt64(KIND_BYTES, true);
  if (found !== BigInt(version)) {
    throw new GrammarError(`${what} must be of version ${version}, but this is of version ${found}; export it again`);
  }
  if (!globalThis.crypto?.subtle) throw new GrammarError("a page must come over HTTPS or from localhost to check digests");
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes.subarray(HEADER_BYTES)));
  let at = digest.every((byte, i) => byte === bytes[DIGEST_AT + i]) ? HEADER_BYTES : Infinity;
  const given = /** @type {Record<string, Given>} */ ({});
  for (const [name, type] of arrays) {
    if (at + SHAPE_BYTES > bytes.length) throw damaged(what);
    const [rows, columns] = [Number(view.getBigInt64(at, true)), Number(view.getBigInt64(at + 8, true))];
    const end = at + SHAPE_BYTES + Math.ceil((rows * columns * type.BYTES_PER_ELEMENT) / 8) * 8;
    if (rows < 0 || columns < 0 || end > bytes.length) throw damaged(what);
    const data = new type(bytes.buffer, at + SHAPE_BYTES, rows * columns);
    given[name] = { at: at + SHAPE_BYTES, rows, columns, data };
    at = end;
  }
  if (at !== bytes.length) throw damaged(what);
  return { bytes, given };
}

/** The tables of a grammar (`jsg/constrained/tables.py`). @param {Uint8Array | ArrayBuffer} file */
export async function readTables(file) {
  const { bytes, given } = await read(file, GRAMMAR);
  const { numbers, classes, sets, positions, listStart, listItems, loops, branches, ruleEnds } = given;
  const [start, numRules, maxPush] = Array.from(numbers.data, Number);
  const numLists = listStart.rows - 1;
  const kindBounds = [1, numLists, loops.rows, 1, branches.rows, loops.rows, 1];
  let isSound =
    [numbers, classes, listStart, listItems, ruleEnds].every(({ columns }) => columns === 1) &&
    [numbers.rows, classes.rows, positions.columns, loops.columns, branches.columns].join() === "3,256,4,10,2" &&
    sets.columns <= 256 && ruleEnds.rows === numLists && positions.data[0] === END_RULE &&
    start >= 0 && start < numLists && maxPush >= 0 && maxPush <= positions.rows && numRules >= 0 && numRules < 2 ** 31 &&
    listStart.data[0] === 0 && listStart.data[numLists] === listItems.rows &&
    within(classes, 0, sets.columns) && within(listItems, 0, positions.rows) && within(ruleEnds, 0, positions.rows) &&
    within(positions, KIND, kindBounds.length) && within(positions, SET, sets.rows) && within(positions, FOLLOW, numLists) &&
    within(branches, 0, numLists) && within(loops, BRANCHES, branches.rows) && within(loops, SEPARATOR_KIND, 3) &&
    within(loops, BRANCHES_END, branches.rows + 1) && within(loops, FIRST_END, positions.rows);
  for (let i = 0; i < numLists; i++) isSound &&= listStart.data[i] <= listStart.data[i + 1];
  for (let i = 0; i < positions.data.length; i += positions.columns) {
    const argument = positions.data[i + ARGUMENT];
    isSound &&= argument >= 0 && argument < kindBounds[positions.data[i + KIND]];
  }
  for (let i = 0; i < loops.data.length; i += loops.columns) {
    const [begin, end, separator, kind, , first] = Array.from(loops.data.subarray(i + BRANCHES, i + loops.columns), Number);
    isSound &&= begin < end && first + end - begin < positions.rows;
    isSound &&= kind === NO_SEPARATOR || (separator >= 0 && separator < numLists);
  }
  if (!isSound) throw damaged(GRAMMAR.what);
  return { bytes, given, start, numRules, maxPush };
}

/** The tokens of a model (`jsg/constrained/run/vocab.py`). @param {Uint8Array | ArrayBuffer} file */
export async function readVocabulary(file) {
  const { size, eosIds, ids, textStart, texts } = (await read(file, VOCABULARY)).given;
  const numRows = Number(size.data[0]);
  let isSound =
    [size, eosIds, ids, textStart, texts].every(({ columns }) => columns === 1) &&
    numRows > 0 && numRows < 2 ** 31 && textStart.rows === ids.rows + 1 && textStart.data[0] === 0 &&
    textStart.data[ids.rows] === texts.rows && within(ids, 0, numRows) && within(eosIds, 0, numRows);
  for (let i = 0; i < ids.rows; i++) {
    const length = textStart.data[i + 1] - textStart.data[i];
    isSound &&= length > 0 && length <= MAX_TOKEN_BYTES;
  }
  if (!isSound) throw damaged(VOCABULARY.what);
  return { size: numRows, eosIds: eosIds.data, ids: ids.data, start: textStart.data, texts: texts.data };
}

/** Whether all numbers of a column are in [0, bound). @param {Given} given @param {number} column @param {number} bound */
function within({ data, columns }, column, bound) {
  for (let i = column; i < data.length; i += columns) if (data[i] < 0 || data[i] >= bound) return false;
  return true;
}

/** @param {string} what */
function damaged(what) {
  return new GrammarError(`the bytes of ${what} are damaged; export it again`);
}
