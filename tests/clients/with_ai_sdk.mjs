// Vercel's AI SDK: texts, objects, tools and streams, with its providers for OpenAI (chat and Responses), for compatible
// servers and for Anthropic.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { EMBEDDED, SCRIPTED } = process.env;
const openai = createOpenAI({ baseURL: `${SCRIPTED}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "jsg",
  baseURL: `${SCRIPTED}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${SCRIPTED}/v1`, apiKey: "none" });
const models = {
  chat: openai.chat("scripted"),
  responses: openai.responses("scripted"),
  compatible: compatible("scripted"),
  anthropic: anthropic("scripted"),
};
const embedded = createOpenAICompatible({ name: "jsg", baseURL: `${EMBEDDED}/v1`, apiKey: "none" })("tiny");

const schema = z.object({ total: z.number().int(), words: z.string() });
const FIVE = { total: 5, words: "five" };
const SAID = 'SCRIPT say {"total": 5, "words": "five"}';
const CALL = 'SCRIPT call add {"a": 2, "b": 3} || say The sum is 5.';
const tools = {
  add: tool({
    description: "Adds two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => a + b,
  }),
};
const once = { maxRetries: 0 };

async function text(name) {
  const done = await generateText({ model: models[name], prompt: "SCRIPT say hello there", ...once });
  assert.equal(done.text, "hello there");
  assert.equal(done.finishReason, "stop");
  assert.ok(done.usage.outputTokens > 0);
}

async function streamed(name) {
  const done = streamText({ model: models[name], prompt: "SCRIPT say hello there", ...once });
  const parts = [];
  for await (const part of done.textStream) parts.push(part);
  assert.ok(parts.length > 1);
  assert.equal(parts.join(""), "hello there");
  assert.ok((await done.usage).outputTokens > 0);
}

async function history(name) {
  const messages = [
    { role: "user", content: "SCRIPT say one || say two" },
    { role: "assistant", content: "one" },
    { role: "user", content: [{ type: "text", text: "go on" }] },
  ];
  const done = await generateText({ model: models[name], instructions: "Be brief.", messages, ...once });
  assert.equal(done.text, "two");
}

async function limit(name) {
  const done = await generateText({ model: models[name], prompt: "SCRIPT say hello there", maxOutputTokens: 5, ...once });
  assert.equal(done.text, "hello");
  assert.equal(done.finishReason, "length");
}

async function call(name) {
  const done = await generateText({ model: models[name], prompt: CALL, tools, ...once });
  assert.deepEqual(done.toolCalls[0].input, { a: 2, b: 3 });
  assert.equal(done.finishReason, "tool-calls");
}

async function round(name) {
  const done = await generateText({ model: models[name], prompt: CALL, tools, stopWhen: stepCountIs(3), ...once });
  assert.equal(done.text, "The sum is 5.");
  assert.equal(done.steps.length, 2);
}

async function streamedRound(name) {
  const done = streamText({ model: models[name], prompt: CALL, tools, stopWhen: stepCountIs(3), ...once });
  const kinds = new Set();
  for await (const part of done.fullStream) kinds.add(part.type);
  for (const kind of ["tool-input-delta", "tool-call", "tool-result", "text-delta"]) assert.ok(kinds.has(kind), kind);
  assert.equal(await done.text, "The sum is 5.");
}

async function choice(name) {
  for (const toolChoice of ["required", { type: "tool", toolName: "add" }]) {
    const done = await generateText({ model: models[name], prompt: CALL, tools, toolChoice, ...once });
    assert.equal(done.toolCalls.length, 1);
  }
}

async function object(name) {
  const done = await generateObject({ model: models[name], schema, prompt: SAID, ...once });
  assert.deepEqual(done.object, FIVE);
}

async function streamedObject(name) {
  const done = streamObject({ model: models[name], schema, prompt: SAID, ...once });
  let last;
  for await (const part of done.partialObjectStream) last = part;
  assert.deepEqual(last, FIVE);
}

async function output(name) {
  const script = 'SCRIPT call add {"a": 2, "b": 3} || say {"total": 5, "words": "five"}';
  const options = { model: models[name], tools, output: Output.object({ schema }), stopWhen: stepCountIs(3) };
  const done = await generateText({ ...options, prompt: script, ...once });
  assert.deepEqual(done.output, FIVE);
}

async function failure(name) {
  const asked = generateText({ model: models[name], prompt: "hi", topP: 7, ...once });
  await assert.rejects(asked, (error) => error.statusCode === 400 && /top_p/.test(error.message));
}

test("chat: text", () => text("chat"));
test("chat: stream", () => streamed("chat"));
test("chat: history", () => history("chat"));
test("chat: limit", () => limit("chat"));
test("chat: call", () => call("chat"));
test("chat: round", () => round("chat"));
test("chat: streamed round", () => streamedRound("chat"));
test("chat: choice of a tool", () => choice("chat"));
test("chat: object", () => object("chat"));
test("chat: streamed object", () => streamedObject("chat"));
test("chat: output and tools", () => output("chat"));
test("chat: failure", () => failure("chat"));

test("responses: text", () => text("responses"));
test("responses: stream", () => streamed("responses"));
test("responses: history", () => history("responses"));
test("responses: limit", () => limit("responses"));
test("responses: call", () => call("responses"));
test("responses: round", () => round("responses"));
test("responses: streamed round", () => streamedRound("responses"));
test("responses: choice of a tool", () => choice("responses"));
test("responses: object", () => object("responses"));
test("responses: streamed object", () => streamedObject("responses"));
test("responses: output and tools", () => output("responses"));
test("responses: failure", () => failure("responses"));

test("compatible: text", () => text("compatible"));
test("compatible: stream", () => streamed("compatible"));
test("compatible: history", () => history("compatible"));
test("compatible: limit", () => limit("compatible"));
test("compatible: call", () => call("compatible"));
test("compatible: round", () => round("compatible"));
test("compatible: streamed round", () => streamedRound("compatible"));
test("compatible: choice of a tool", () => choice("compatible"));
test("compatible: object", () => object("compatible"));
test("compatible: streamed object", () => streamedObject("compatible"));
test("compatible: output and tools", () => output("compatible"));
test("compatible: failure", () => failure("compatible"));

test("anthropic: text", () => text("anthropic"));
test("anthropic: stream", () => streamed("anthropic"));
test("anthropic: history", () => history("anthropic"));
test("anthropic: limit", () => limit("anthropic"));
test("anthropic: call", () => call("anthropic"));
test("anthropic: round", () => round("anthropic"));
test("anthropic: streamed round", () => streamedRound("anthropic"));
test("anthropic: choice of a tool", () => choice("anthropic"));

test("embedded: text", async () => {
  const done = await generateText({ model: embedded, prompt: "What is the capital of France?", temperature: 0, ...once });
  assert.match(done.text, /Paris/);
});

test("embedded: stop", async () => {
  const options = { model: embedded, prompt: "What is the capital of France?", temperature: 0, stopSequences: ["Paris"] };
  assert.doesNotMatch((await generateText({ ...options, ...once })).text, /Paris/);
});

test("embedded: aborted", async () => {
  const asked = generateText({ model: models.chat, prompt: `SCRIPT say ${"long ".repeat(400)}`, ...once, timeout: 300 });
  await assert.rejects(asked);
});
