/** A compiled grammar (`jsg/constrained/tables.py`), which kernels read in place. They check no index, so this does. */

import { arrayAt, damaged, readFile } from "./files.js";

const WHAT = "a compiled grammar";
const FORM = /** @type {const} */ ({
  kind: "jsg.grammar",
  version: 4,
  what: WHAT,
  arrays: [
    ["numbers", "i64"], ["classes", "u8"], ["sets", "u8"], ["positions", "i32"], ["listStart", "i32"],
    ["listItems", "i32"], ["loops", "i64"], ["branches", "i64"], ["ruleEnds", "i32"],
  ],
});
const [CALL, LOOP, END_RULE, END_BRANCH, END_SEPARATOR, NUM_KINDS] = [1, 2, 3, 4, 5, 7];
const [KIND, ARGUMENT, SET, FOLLOW, POSITION_COLUMNS] = [0, 1, 2, 3, 4];
const [BRANCHES, BRANCHES_END, SEPARATOR, SEPARATOR_KIND, FIRST_END, LOOP_COLUMNS] = [4, 5, 6, 7, 9, 10];
const [NO_SEPARATOR, BRANCH_COLUMNS] = [0, 2];

/**
 * @typedef {object} Tables
 * @property {Uint8Array} bytes the file
 * @property {Record<string, import("./files.js").Place>} places where each array is in it
 * @property {Uint8Array} classes the class of each byte
 * @property {BigInt64Array} loops
 * @property {number} start @property {number} numRules @property {number} maxPush
 */

/** @param {Uint8Array | ArrayBuffer} given @returns {Promise<Tables>} */
export async function readTables(given) {
  const { bytes, places } = await readFile(given, FORM);
  const numbers = [...arrayAt(bytes, places.numbers, BigInt64Array)].map(Number);
  const [start, numRules, maxPush] = numbers;
  const read = (/** @type {string} */ name, /** @type {any} */ type) => arrayAt(bytes, places[name], type);
  const classes = read("classes", Uint8Array);
  const loops = read("loops", BigInt64Array);
  const branches = read("branches", BigInt64Array);
  const [positions, listStart, listItems, ruleEnds] = ["positions", "listStart", "listItems", "ruleEnds"].map((name) =>
    read(name, Int32Array),
  );
  const { rows: numPositions } = places.positions;
  const [numLists, numClasses] = [places.listStart.rows - 1, places.sets.columns];
  const [numLoops, numBranches] = [places.loops.rows, places.branches.rows];
  const bounds = new Array(NUM_KINDS).fill(1);
  Object.assign(bounds, { [CALL]: numLists, [LOOP]: numLoops, [END_BRANCH]: numBranches, [END_SEPARATOR]: numLoops });
  const isSound =
    numbers.length === 3 &&
    classes.length === 256 &&
    ["numbers", "classes", "listStart", "listItems", "ruleEnds"].every((name) => places[name].columns === 1) &&
    places.positions.columns === POSITION_COLUMNS &&
    places.loops.columns === LOOP_COLUMNS &&
    places.branches.columns === BRANCH_COLUMNS &&
    within(numClasses - 1, 256) &&
    numLists > 0 &&
    numPositions > 0 &&
    positions[0] === END_RULE &&
    listStart[0] === 0 &&
    listStart[numLists] === listItems.length &&
    listStart.every((at, i) => i === 0 || at >= listStart[i - 1]) &&
    classes.every((klass) => klass < numClasses) &&
    listItems.every((position) => within(position, numPositions)) &&
    ruleEnds.length === numLists &&
    ruleEnds.every((position) => within(position, numPositions)) &&
    within(start, numLists) &&
    within(maxPush, numPositions + 1) &&
    within(numRules, 2 ** 31) &&
    eachRow(positions, POSITION_COLUMNS, (at) => {
      const kind = positions[at + KIND];
      return (
        within(kind, NUM_KINDS) &&
        within(positions[at + ARGUMENT], bounds[kind]) &&
        within(positions[at + SET], places.sets.rows) &&
        within(positions[at + FOLLOW], numLists)
      );
    }) &&
    eachRow(branches, BRANCH_COLUMNS, (at) => within(Number(branches[at]), numLists)) &&
    eachRow(loops, LOOP_COLUMNS, (at) => {
      const column = (/** @type {number} */ i) => Number(loops[at + i]);
      const size = column(BRANCHES_END) - column(BRANCHES);
      return (
        within(column(BRANCHES), numBranches + 1) &&
        within(column(BRANCHES_END), numBranches + 1) &&
        size > 0 &&
        within(column(SEPARATOR_KIND), 3) &&
        (column(SEPARATOR_KIND) === NO_SEPARATOR || within(column(SEPARATOR), numLists)) &&
        within(column(FIRST_END), numPositions) &&
        column(FIRST_END) + size < numPositions
      );
    });
  if (!isSound) throw damaged(WHAT, "an index points outside");
  return { bytes, places, classes, loops, start, numRules, maxPush };
}

/** @param {number} value @param {number} bound */
function within(value, bound) {
  return value >= 0 && value < bound;
}

/** @param {{length: number}} array @param {number} columns @param {(at: number) => boolean} isSound */
function eachRow(array, columns, isSound) {
  for (let at = 0; at < array.length; at += columns) {
    if (!isSound(at)) return false;
  }
  return true;
}
