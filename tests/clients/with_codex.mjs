// Codex CLI: its program runs, with an empty home, against a model that calls its tools.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

const { SCRIPTED } = process.env;

// What Codex prints when the model does what the script says.
function run(script, ...options) {
  const home = mkdtempSync(join(tmpdir(), "codex-home-"));
  const provider = `{ name = "jsg", base_url = "${SCRIPTED}/v1", wire_api = "responses" }`;
  const settings = ["model_provider=jsg", `model_providers.jsg=${provider}`, ...options].flatMap((each) => ["-c", each]);
  const flags = ["exec", "--skip-git-repo-check", "-m", "scripted", ...settings];
  const done = spawnSync("node_modules/.bin/codex", [...flags, `SCRIPT ${script}`], {
    env: { PATH: process.env.PATH, HOME: home, CODEX_HOME: home },
    input: "",
    encoding: "utf8",
    timeout: 120_000,
  });
  assert.equal(done.status, 0, done.stderr);
  return { said: done.stdout.trim(), log: done.stderr };
}

test("a command", () => {
  const { said, log } = run('call exec_command {"cmd": "echo $((6 * 7))"} || say It said 42.');
  assert.equal(said, "It said 42.");
  assert.match(log, /succeeded in \d+ms:\s+42/);
});

test("several calls, and a tool of a namespace", () => {
  const plan = 'call update_plan {"plan": [{"status": "pending", "step": "a"}]}';
  const spawn = 'call multi_agent_v1__spawn_agent {"message": "SCRIPT say sub"}';
  const { said, log } = run(`${plan} && call exec_command {"cmd": "pwd"} || ${spawn} || say done`);
  assert.equal(said, "done");
  assert.match(log, /SpawnAgent/);
});

test("a custom tool with a grammar", () => {
  const { said, log } = run('call exec {"input": "text(6 * 7)"} || say done', "features.code_mode=true");
  assert.equal(said, "done");
  assert.doesNotMatch(log, /unsupported call|ERROR/);
});
