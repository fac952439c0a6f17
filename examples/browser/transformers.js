/**
 * A logits processor for one call of transformers.js: `model.generate({ ...inputs, logits_processor: [constrain(grammar)] })`.
 * @param grammar what `load` of @jsg/grammar gave
 */
export function constrain(grammar) {
  const rows = []; // of the batch: the matcher of each, and how many tokens it has seen
  return (inputIds, logits) => {
    inputIds.forEach((ids, i) => {
      const row = (rows[i] ??= { matcher: grammar.matcher(), numSeen: ids.length }); // at first it sees the prompt
      for (; row.numSeen < ids.length; row.numSeen++) {
        if (!row.matcher.accept(Number(ids[row.numSeen]))) throw new Error(`token ${ids[row.numSeen]} is not allowed`);
      }
      const size = logits.dims.at(-1);
      forbid(logits.data.subarray(i * size, (i + 1) * size), row.matcher.mask());
    });
    return logits;
  };
}

/** Makes all tokens impossible that a mask does not allow. @param {Float32Array} scores @param {Uint32Array} mask */
export function forbid(scores, mask) {
  for (let begin = 0; begin < scores.length; begin += 32) {
    const allowed = mask[begin >> 5] ?? 0; // a model may have more rows than its vocabulary has tokens
    const end = Math.min(begin + 32, scores.length);
    if (allowed === 0) scores.fill(-Infinity, begin, end);
    else if (allowed !== 0xffffffff) {
      for (let token = begin; token < end; token++) if (!((allowed >>> (token & 31)) & 1)) scores[token] = -Infinity;
    }
  }
}
