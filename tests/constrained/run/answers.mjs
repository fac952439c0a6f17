// What the module says of texts, for tests: in Node `node answers.mjs MODULE WORK`, in a page `answersTo(load, work)`.

const hex = (bytes) => Array.from(new Uint8Array(bytes), (byte) => byte.toString(16).padStart(2, "0")).join("");
const bytesOf = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

async function answer(matcher) {
  try {
    const mask = hex(await crypto.subtle.digest("SHA-256", matcher.mask()));
    return [mask, hex(matcher.forcedBytes()), matcher.forced(), matcher.isComplete, matcher.config];
  } catch (error) {
    return [error.name];
  }
}

/** The answers before and after each step of each text: a token is accepted, and -n takes n tokens back. */
export async function answersTo(load, { vocabularies, grammars }) {
  const known = {};
  const found = [];
  for (const { tables, vocabulary, texts } of grammars) {
    const grammar = await load(bytesOf(tables), known[vocabulary] ?? bytesOf(vocabularies[vocabulary]));
    known[vocabulary] = grammar.vocabulary;
    for (const steps of texts) {
      const matcher = grammar.matcher();
      const answers = [await answer(matcher)];
      for (const step of steps) {
        const isAccepted = step < 0 ? matcher.rollback(-step) === undefined : matcher.accept(step);
        answers.push([isAccepted, ...(await answer(matcher))]);
      }
      found.push(answers);
    }
  }
  return found;
}

/** What is said of each pair of files: "" where it is loaded. */
async function verdicts(load, pairs) {
  const say = ([tables, vocabulary]) => load(bytesOf(tables), bytesOf(vocabulary)).then(() => "", (error) => `${error}`);
  return Promise.all(pairs.map(say));
}

if (globalThis.process) {
  const { readFile } = await import("node:fs/promises");
  const { load } = await import(process.argv[2]);
  const work = JSON.parse(await readFile(process.argv[3], "utf8"));
  console.log(JSON.stringify(await (work.pairs ? verdicts(load, work.pairs) : answersTo(load, work))));
}
