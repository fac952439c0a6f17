// Reads the text format of Prometheus, and computes what the view "Engine" shows from two scrapes.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The samples of a scrape: name → a list of {labels, value}. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (match === null) continue;
    const [, name, labels = "", value] = match;
    if (!found.has(name)) found.set(name, []);
    const pairs = [...labels.matchAll(LABEL)].map((each) => [each[1], each[2]]);
    found.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return found;
}

/** The numbers of a scrape that the view shows or computes with. A series that is not there is 0. */
export function readings(text, now) {
  const samples = parseMetrics(text);
  const of = (name) => (samples.get(`jsg:${name}`) ?? []).reduce((sum, { value }) => sum + value, 0);
  const kv = Object.fromEntries((samples.get("jsg:kv_tokens") ?? []).map(({ labels, value }) => [labels.state, value]));
  const waits = (samples.get("jsg:waiting_requests") ?? []).filter(({ value }) => value > 0);
  return {
    now,
    kv,
    waits: waits.map(({ labels, value }) => [labels.reason, value]),
    capacity: of("kv_capacity_tokens"),
    running: of("requests_running"),
    waiting: of("requests_waiting"),
    usage: of("kv_usage"),
    prompt: of("engine_prompt_tokens_total"),
    cached: of("engine_cached_tokens_total"),
    generated: of("engine_generated_tokens_total"),
    steps: of("engine_steps_total"),
    busy_s: of("scheduler_busy_seconds_total"),
    compiled: of("programs_compiled_total"),
    pending: of("programs_pending"),
    retracts: of("retracts_total"),
  };
}

/** What happened between two scrapes. Shares and means are null where nothing happened. */
export function between(before, after) {
  const grown = (name) => Math.max(0, after[name] - before[name]);
  const ratio = (above, below) => (below > 0 ? above / below : null);
  const seconds = (after.now - before.now) / 1000;
  return {
    rate: ratio(grown("generated"), seconds),
    batch: ratio(grown("generated"), grown("steps")),
    step_ms: ratio(1000 * grown("busy_s"), grown("steps")),
    hit: ratio(grown("cached"), grown("prompt")),
  };
}
