/** The files that jsg exports (`jsg/constrained/files.py`): a header, and then arrays that are used in place. */

const HEADER_BYTES = 56;
const KIND_BYTES = 16;
const DIGEST_AT = 24;
const SHAPE_BYTES = 16;
const ITEM_BYTES = { u8: 1, i32: 4, i64: 8 };

/** What the bytes or the grammar must be, and are not. */
export class GrammarError extends Error {
  name = "GrammarError";
}

/**
 * An array as kernels see it: its address (or place in a file), its lengths, and the bytes of an item.
 * @typedef {{address: number, rows: number, columns: number, itemBytes: number}} Place
 */

/**
 * Reads a file.
 * @param {Uint8Array | ArrayBuffer} given
 * @param {{kind: string, version: number, what: string, arrays: [string, keyof ITEM_BYTES][]}} form
 * @returns {Promise<{bytes: Uint8Array, places: Record<string, Place>}>} the bytes, which begin at a multiple of 8
 *   of their buffer, and where in them each array is
 */
export async function readFile(given, { kind, version, what, arrays }) {
  const bytes = new Uint8Array(given).slice(); // a copy: nobody changes it after it was checked
  const view = new DataView(bytes.buffer);
  const name = new TextDecoder().decode(bytes.subarray(0, KIND_BYTES)).replace(/\0+$/, "");
  if (name !== kind || bytes.length < HEADER_BYTES) {
    throw new GrammarError(
      `${what} must begin with "${kind}", but this begins with ${JSON.stringify(name)}; give what jsg exported as one`,
    );
  }
  if (view.getBigInt64(KIND_BYTES, true) !== BigInt(version)) {
    const found = view.getBigInt64(KIND_BYTES, true);
    throw new GrammarError(
      `${what} must be of version ${version}, but this is of version ${found}; export it with the jsg of this module`,
    );
  }
  if (!globalThis.crypto?.subtle) {
    throw new GrammarError("files are checked with crypto.subtle, which pages have over HTTPS or from localhost only");
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes.subarray(HEADER_BYTES)));
  if (digest.some((byte, i) => byte !== bytes[DIGEST_AT + i])) {
    throw damaged(what, "it does not have the digest that it names");
  }
  const places = /** @type {Record<string, Place>} */ ({});
  let at = HEADER_BYTES;
  for (const [array, item] of arrays) {
    if (at + SHAPE_BYTES > bytes.length) throw damaged(what, "it ends too soon");
    const [rows, columns] = [Number(view.getBigInt64(at, true)), Number(view.getBigInt64(at + 8, true))];
    const itemBytes = ITEM_BYTES[item];
    places[array] = { address: at + SHAPE_BYTES, rows, columns, itemBytes };
    at += SHAPE_BYTES + Math.ceil((rows * columns * itemBytes) / 8) * 8;
    if (rows < 0 || columns < 0 || at > bytes.length) throw damaged(what, "it ends too soon");
  }
  if (at !== bytes.length) throw damaged(what, "something is after its end");
  return { bytes, places };
}

/** @param {string} what @param {string} why */
export function damaged(what, why) {
  return new GrammarError(`${what} is damaged (${why}); export it again`);
}

/** An array of a file. @param {Uint8Array} bytes @param {Place} place @param {any} type */
export function arrayAt(bytes, { address, rows, columns }, type) {
  return new type(bytes.buffer, bytes.byteOffset + address, rows * columns);
}
