// Times of a grammar engine in a page: `measure(engine, work)`; see browser.py.

const bytesOf = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

/** Loads an engine; then each call makes a grammar, and a function that makes matchers of it. */
const engines = {
  async jsg() {
    const { load } = await import("/module/index.js");
    return (work) => {
      let vocabulary = bytesOf(work.vocabulary);
      const out = new Uint32Array(Math.ceil(work.size / 32));
      return async (given) => {
        const grammar = await load(given.tables, vocabulary);
        vocabulary = grammar.vocabulary;
        return () => {
          const matcher = grammar.matcher();
          return { mask: () => matcher.mask(out), accept: (token) => matcher.accept(token) };
        };
      };
    };
  },
  async xgrammar() {
    await import("/peer/index.js");
    const peer = globalThis.xgrammar;
    return (work) => {
      let made;
      return async ({ kind, text }) => {
        made ??= await peer.TokenizerInfo.createTokenizerInfo(work.encoded, "byte_level", false, work.size, [work.eos_id]);
        const compiler = await peer.GrammarCompiler.createGrammarCompiler(made, false);
        const ways = { // as jsg reads schemas: white space is fixed, and objects are closed
          json_schema: () => compiler.compileJSONSchema(text, false, -1, [", ", ": "], true),
          json: () => compiler.compileBuiltinJSONGrammar(),
          ebnf: () => compiler.compileGrammar(text),
          regex: () => compiler.compileStructuralTag({ type: "structural_tag", format: { type: "regex", pattern: text } }),
        };
        const compiled = await ways[kind]();
        const matcher = await peer.GrammarMatcher.createGrammarMatcher(compiled);
        return () => {
          matcher.reset();
          return { mask: () => matcher.getNextTokenBitmask(), accept: (token) => matcher.acceptToken(token) };
        };
      };
    };
  },
};

/** Milliseconds until the first mask, from the module, the files and the texts on; then times of masks and tokens in microseconds. */
export async function measure(engine, work) {
  const make = (await engines[engine]())(work);
  const cases = work.cases.map((given) => ({ ...given, tables: bytesOf(given.tables) }));
  const found = { first_ms: 0, cases: {} };
  for (const given of cases) {
    try {
      const begun = performance.now();
      const start = await make(given);
      let matcher = start();
      await matcher.mask();
      found.first_ms ||= performance.now() - begun;
      const times = { cold: [], warm: [], accept: [] };
      for (const pace of ["cold", "warm", "warm"]) {
        matcher = start();
        for (const token of given.token_ids) {
          const before = performance.now();
          await matcher.mask();
          const between = performance.now();
          if (!matcher.accept(token)) throw new Error(`token ${token} is not allowed`);
          times[pace].push((between - before) * 1000);
          times.accept.push((performance.now() - between) * 1000);
        }
      }
      found.cases[given.name] = times;
    } catch (error) {
      found.cases[given.name] = { refused: `${error}` };
    }
  }
  return found;
}
