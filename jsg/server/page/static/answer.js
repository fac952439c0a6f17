// Reads the stream of an answer into its node: thoughts, text, calls of tools, log-probabilities, usage, times.

const MIN_RATE_S = 0.05; // tokens that came together, as those of a grammar do, have no rate

/**
 * Streams the answer to a body into a node, and calls `changed` after each event.
 * Raises what the stream raises; the node then has what came before.
 */
export async function streamAnswer(app, body, node, changed, signal) {
  const clock = { begun: performance.now(), first: null, last: null };
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  try {
    const warned = (warnings) => {
      node.warnings = warnings;
    };
    for await (const { data } of app.stream("v1/chat/completions", { body: streamed, signal, warned })) {
      const event = JSON.parse(data);
      for (const choice of event.choices) takeChoice(node, choice, clock);
      if (event.usage) node.usage = event.usage;
      node.times = timesOf(clock, node);
      changed();
    }
  } finally {
    node.times = timesOf(clock, node);
  }
}

function takeChoice(node, { delta, logprobs, finish_reason: finish, matched_stop: stop, constraint, drafts }, clock) {
  const { reasoning_content: thoughts } = delta;
  if (thoughts || delta.content || delta.tool_calls || logprobs) {
    clock.last = performance.now();
    clock.first ??= clock.last;
  }
  if (thoughts) node.thoughts = (node.thoughts ?? "") + thoughts;
  node.text += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) takeCall(node, piece);
  if (logprobs) (node.tokens ??= []).push(...logprobs.content.map(tokenOf));
  if (finish) node.finish = finish;
  if (typeof stop === "number") node.has_end = true; // its last token is the one that ended it, and no text
  if (constraint) node.constraint = constraint;
  if (drafts) node.drafts = drafts;
}

/** A call comes in pieces: the first one has its name, the others have parts of its arguments. */
function takeCall(node, { index, id, function: piece }) {
  node.calls ??= [];
  const call = (node.calls[index] ??= { id: "", name: "", arguments: "" });
  if (id) call.id = id;
  call.name += piece?.name ?? "";
  call.arguments += piece?.arguments ?? "";
}

function tokenOf({ token, logprob, top_logprobs: top }) {
  return { text: token, logprob, top: top.map((other) => ({ text: other.token, logprob: other.logprob })) };
}

function timesOf({ begun, first, last }, node) {
  const num = node.usage?.completion_tokens ?? 0;
  const seconds = first === null ? 0 : (last - first) / 1000;
  return {
    first_ms: first === null ? null : first - begun,
    rate: num > 1 && seconds > MIN_RATE_S ? (num - 1) / seconds : null,
  };
}

/** What is told below an answer, as short texts. */
export function factsOf(node) {
  const facts = [];
  const { usage, times, constraint, drafts } = node;
  if (times?.first_ms != null) facts.push(`first token ${Math.round(times.first_ms)} ms`);
  if (times?.rate != null) facts.push(`${times.rate.toFixed(times.rate < 10 ? 1 : 0)} tokens/s`);
  if (usage) {
    facts.push(`${usage.completion_tokens} tokens`);
    facts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  if (constraint) facts.push(`grammar wrote ${Math.round(100 * constraint.forced_share)} %`);
  const drafted = Object.values(drafts?.taken ?? {}).reduce((all, count) => all + count, 0);
  if (drafted) facts.push(`${drafted} tokens by drafts`);
  if (constraint && !constraint.is_complete) facts.push("form incomplete");
  if (node.finish && node.finish !== "stop") facts.push(`ended by ${node.finish}`);
  return facts;
}
