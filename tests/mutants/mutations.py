"""What `python -m tests.mutants` breaks: one line of the core of each package at a time."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """One break.

    Attributes:
        name: The package and what is broken.
        path: The file.
        old: A text that stands in it once.
        new: What stands there instead.
        tests: Fast tests that should find it, as arguments of pytest.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str

    def applied(self, text: str) -> str:
        """The file with the break."""
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} must stand once in {self.path}"
        return text.replace(self.old, self.new)


CACHE = (
    Mutation(
        "cache: a split gives the lower half the pages of the upper",
        "jsg/cache/node.py",
        "self.pages = self.pages[num_pages * INT_BYTES :]",
        "self.pages = self.pages[: len(self.pages) - num_pages * INT_BYTES]",
        "tests/cache",
    ),
    Mutation(
        "cache: a split forgets the locks of the lower half",
        "jsg/cache/node.py",
        "            num_locks=self.num_locks,\n",
        "",
        "tests/cache",
    ),
    Mutation(
        "cache: a match is one page longer than what is equal",
        "jsg/cache/node.py",
        "return int(differs.argmax()) if differs.any() else count",
        "return min(int(differs.argmax()) + 1, count) if differs.any() else count",
        "tests/cache",
    ),
    Mutation(
        "cache: a page is freed twice without notice",
        "jsg/cache/allocator.py",
        "if (self._index[pages] != _USED).any():",
        "if False:",
        "tests/cache",
    ),
    Mutation(
        "cache: a leaf that was used since it was queued is evicted first",
        "jsg/cache/eviction.py",
        "if node.is_evictable_leaf and node.last_used > queued_at:",
        "if False:",
        "tests/cache",
    ),
    Mutation(
        "cache: an eviction does not shorten the watches",
        "jsg/cache/radix.py",
        "self._watches.put_back(watch, parent, watch.matched - leaf.num_tokens)",
        "self._watches.put_back(watch, parent, watch.matched)",
        "tests/cache",
    ),
    Mutation(
        "cache: all namespaces share one root",
        "jsg/cache/radix.py",
        "return self._roots.get(namespace) or Root(namespace)",
        'return self._roots.get("") or Root("")',
        "tests/cache",
    ),
    Mutation(
        "cache: an unlock leaves the pages protected",
        "jsg/cache/radix.py",
        "self.num_evictable += locked.num_pages\n                self.num_protected -= locked.num_pages\n        self",
        "pass\n        self",
        "tests/cache",
    ),
)

CONSTRAINED = (
    Mutation(
        "constrained: a mask gets the bit of another token",
        "jsg/constrained/run/kernels.py",
        "mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)",
        "mask[token >> 5] |= np.uint32(1) << np.uint32(token & 30)",
        "tests/constrained/run",
    ),
    Mutation(
        "constrained: a state forgets a byte that it reads",
        "jsg/constrained/run/states.py",
        "        code = target + 1 if target >= 0 else DEAD",
        "        code = target + 1 if target > 0 else DEAD",
        "tests/constrained/run",
    ),
    Mutation(
        "constrained: a call of a rule does not push where to go on",
        "jsg/constrained/run/steps.py",
        "above = frame if is_tail else make_frame(m, frame, back, -1, 0, 0)",
        "above = frame",
        "tests/constrained/run",
    ),
    Mutation(
        "constrained: the end of a rule does not pop its frame",
        "jsg/constrained/run/steps.py",
        "        return add_work(m, size, m.frames[frame, RETURN], m.frames[frame, PARENT])\n    begin",
        "        return add_work(m, size, m.frames[frame, RETURN], frame)\n    begin",
        "tests/constrained/run",
    ),
    Mutation(
        "constrained: a loop ends one item too soon",
        "jsg/constrained/run/steps.py",
        "return count >= t.loops[loop, MIN] and",
        "return count + 1 >= t.loops[loop, MIN] and",
        "tests/constrained/run",
    ),
    Mutation(
        "constrained: forced text ends inside a character",
        "jsg/constrained/run/machine.py",
        "        return data[:-1] if data and data[-1] >= 0xC0 else data",
        "        return data",
        "tests/constrained/run",
    ),
    Mutation(
        "constrained: a mask is found by its states alone",
        "jsg/constrained/run/mask_cache.py",
        "        key = machine.frames_read(config, depth)\n",
        "        key, depth = machine.frames_read(config, 0), 0\n",
        "tests/constrained/run",
    ),
    Mutation(
        "constrained: EOS is allowed before a text is complete",
        "jsg/constrained/run/mask_cache.py",
        "        if is_complete:\n            words |=",
        "        if words.any():\n            words |=",
        "tests/constrained/run/test_masker.py",
    ),
    Mutation(
        "constrained: a rollback goes back by one token",
        "jsg/constrained/run/masker.py",
        "self._place = self._passed[-num_tokens]",
        "self._place = self._passed[-1]",
        "tests/constrained/run/test_masker.py",
    ),
    Mutation(
        "constrained: surrogates are characters of UTF-8",
        "jsg/constrained/utf8.py",
        "((0xED, 0xED), ((0x80, 0x9F), _TAIL)),",
        "((0xED, 0xED), (_TAIL, _TAIL)),",
        "tests/constrained/tags tests/constrained/run/test_vocab.py",
    ),
    Mutation(
        "constrained: continuation bytes of different characters meet",
        "jsg/constrained/utf8.py",
        "    for first, same in itertools.groupby(spans, key=operator.itemgetter(0)):",
        "    for first, same in itertools.groupby(spans, key=lambda span: span[0] >> 1):",
        "tests/constrained/chars",
    ),
    Mutation(
        "constrained: a backslash in a string needs no escape",
        "jsg/constrained/schema/json_text.py",
        "(0x23, 0x5B), (0x5D, 0xD7FF)",
        "(0x23, 0xD7FF)",
        "tests/constrained/schema",
    ),
    Mutation(
        "constrained: equivalent states are merged without a look at where texts end",
        "jsg/constrained/automata.py",
        "block[state] = numbers.setdefault((state in accepting, row), len(numbers))",
        "block[state] = numbers.setdefault((False, row), len(numbers))",
        "tests/constrained/chars",
    ),
    Mutation(
        "constrained: readings that differ by a count are taken for one",
        "jsg/constrained/build/ambiguity.py",
        "    return _Search(_Levels(parts, firsts)).run()",
        "    return set()",
        "tests/constrained/run/test_counted.py",
    ),
    Mutation(
        "constrained: a rule that begins with itself is built",
        "jsg/constrained/build/finish.py",
        "            elif child in open_units:",
        "            elif child in open_units and len(path) > 99:",
        "tests/constrained/build",
    ),
    Mutation(
        "constrained: the closing of free text is missed behind its own beginning",
        "jsg/constrained/tags/free_text.py",
        "failure[child] = self._next[failure[node]].get(byte, 0)",
        "failure[child] = 0",
        "tests/constrained/tags",
    ),
    Mutation(
        "constrained: minItems says nothing",
        "jsg/constrained/schema/containers.py",
        'min_items=reader.count("minItems") or 0,',
        "min_items=0,",
        "tests/constrained/schema",
    ),
    Mutation(
        "constrained: an exclusive bound is inclusive",
        "jsg/constrained/schema/assertions.py",
        'bounds.append((keyword == "minimum", reader.number(exclusive), True))',
        'bounds.append((keyword == "minimum", reader.number(exclusive), False))',
        "tests/constrained/schema",
    ),
    Mutation(
        "constrained: additionalProperties says nothing",
        "jsg/constrained/schema/containers.py",
        'ANY if is_open else context.child(place, "additionalProperties"),',
        "ANY,",
        "tests/constrained/schema",
    ),
    Mutation(
        "constrained: oneOf is anyOf",
        "jsg/constrained/schema/formulas.py",
        "            rivals = [self.of(-other, kind) for other in (*overlapping, *others)]",
        "            rivals = list[Formula]()",
        "tests/constrained/schema",
    ),
    Mutation(
        "constrained: a format that is not known well is no rule",
        "jsg/constrained/schema/assertions.py",
        "    if name in STANDARD_FORMATS:",
        "    if False:",
        "tests/constrained/schema",
    ),
    Mutation(
        "constrained: look-ahead in a pattern is passed over",
        "jsg/constrained/regex/reader.py",
        '("=", "look-ahead is not supported"),',
        "",
        "tests/constrained/test_regex.py",
    ),
    Mutation(
        "constrained: left recursion loses what follows the call",
        "jsg/constrained/ebnf/recursion.py",
        "                heads = [(rule, seq(after, rest)) for rule, after in heads]",
        "                heads = [(rule, after) for rule, after in heads]",
        "tests/constrained/test_ebnf.py",
    ),
    Mutation(
        "constrained: no text runs out of fuel",
        "jsg/constrained/run/machine.py",
        "        if counters[FUEL] < 0:",
        "        if False:",
        "tests/constrained/build/test_fuel.py",
    ),
)

DEVICE = (
    Mutation(
        "sampling: the mask is not used",
        "jsg/engine/device/sampling.py",
        "jnp.where(allowed, logits, -jnp.inf)\n    scores = scores if tables",
        "logits\n    scores = scores if tables",
        "tests/engine/device/test_sampling.py tests/engine/grammars/test_constraints.py",
    ),
    Mutation(
        "sampling: the bits of a mask are read from the other end",
        "jsg/engine/device/sampling.py",
        "jnp.arange(32, dtype=jnp.uint32)) & 1",
        "jnp.arange(31, -1, -1, dtype=jnp.uint32)) & 1",
        "tests/engine/device/test_sampling.py tests/engine/grammars/test_constraints.py",
    ),
    Mutation(
        "sampling: the noise does not depend on the output index",
        "jsg/engine/device/sampling.py",
        "noise = gumbel(inputs.seeds, inputs.output_index, scores.shape[1], first)",
        "noise = gumbel(inputs.seeds, inputs.output_index * 0, scores.shape[1], first)",
        "tests/engine/device/test_sampling.py tests/engine/test_core.py",
    ),
    Mutation(
        "sampling: a repetition penalty multiplies positive logits",
        "jsg/engine/device/sampling.py",
        "jnp.where(logits > 0, logits / repetition, logits * repetition)",
        "logits * repetition",
        "tests/engine/device/test_sampling.py",
    ),
    Mutation(
        "sampling: a row that is not finite is sampled",
        "jsg/engine/device/sampling.py",
        "return (~(logits < jnp.inf)).any(axis=-1)",
        "return (logits != logits).all(axis=-1)",
        "tests/engine/device/test_sampling.py tests/engine/test_faults.py",
    ),
    Mutation(
        "sampling: of equal scores on several devices the last wins",
        "jsg/engine/device/sampling.py",
        "winner = jnp.argmax(scores, axis=0)",
        "winner = scores.shape[0] - 1 - jnp.argmax(scores[::-1], axis=0)",
        "tests/engine/device/test_parallel_sampling.py",
    ),
    Mutation(
        "packing: min_new_tokens does not put off the end",
        "jsg/engine/device/packing.py",
        "if output_index < running.request.sampling.min_new_tokens:",
        "if False:",
        "tests/engine/test_core.py",
    ),
    Mutation(
        "packing: every request ends at EOS",
        "jsg/engine/device/packing.py",
        "*(() if sampling.ignore_eos else eos_token_ids)",
        "*eos_token_ids",
        "tests/engine/test_core.py",
    ),
    Mutation(
        "packing: positions of a joined row are its indices",
        "jsg/engine/device/packing.py",
        "layout.positions[entry.start : entry.start + entry.num_new]",
        "np.arange(entry.start, entry.start + entry.num_new)",
        "tests/engine/test_joined.py",
    ),
    Mutation(
        "packing: the output index of drafts does not count up",
        "jsg/engine/device/packing.py",
        "np.repeat(output_index - batch.first_rows, counts) + np.arange(len(rows))",
        "np.repeat(output_index, counts)",
        "tests/engine/grammars/test_constraints.py tests/engine/grammars/test_modes.py",
    ),
)

MODELS = (
    Mutation(
        "models: rotation turns the other way",
        "jsg/models/rope.py",
        "jnp.sin(angles) * scale)",
        "-jnp.sin(angles) * scale)",
        "tests/models/test_rope.py tests/golden",
    ),
    Mutation(
        "models: llama3 frequencies are not blended",
        "jsg/models/rope.py",
        "turns > rope.high_freq_factor, fast, blend",
        "turns > rope.high_freq_factor, fast, slow",
        "tests/models/test_rope.py",
    ),
    Mutation(
        "models: a scale of 8 bits is that of the whole kernel",
        "jsg/models/quantise.py",
        "largest = jnp.max(jnp.abs(numbers), axis=1, keepdims=True)",
        "largest = jnp.broadcast_to(jnp.max(jnp.abs(numbers)), (len(numbers), 1))",
        "tests/models/test_quantise.py",
    ),
    Mutation(
        "models: gate and up of an expert are exchanged",
        "jsg/models/experts.py",
        'self.gate = _stacked([f"{name}.w1" for name in names]',
        'self.gate = _stacked([f"{name}.w3" for name in names]',
        "tests/models tests/golden",
    ),
    Mutation(
        "kernels: a query sees the token behind it",
        "jsg/kernels_pallas/reference.py",
        "seen = _seen(positions, kv_len - 1, static.window)",
        "seen = _seen(positions, kv_len - 2, static.window)",
        "tests/kernels_pallas/test_reference.py",
    ),
)

PROCESSING = (
    Mutation(
        "processing: failure links of stop strings lead to the root",
        "jsg/processing/stop_strings.py",
        "self._failure[child] = self._step(self._failure[node], char)",
        "self._failure[child] = 0",
        "tests/processing/test_stop_strings.py",
    ),
    Mutation(
        "processing: nothing is held back for a stop string",
        "jsg/processing/stop_strings.py",
        "return self._depth[self._node]",
        "return 0",
        "tests/processing",
    ),
    Mutation(
        "processing: half a character is text",
        "jsg/processing/detokenizer.py",
        'codecs.getincrementaldecoder("utf-8")(errors="replace")',
        'codecs.getincrementaldecoder("latin-1")(errors="replace")',
        "tests/processing/test_detokenizer.py",
    ),
    Mutation(
        "processing: a special token that a client writes counts",
        "jsg/processing/client_text.py",
        "pieces += [Stretch(text[done : found.start()], True), Stretch(found[0], False)]",
        "pieces += [Stretch(text[done : found.start()], True), Stretch(found[0], True)]",
        "tests/processing/test_encode_parts.py tests/server/test_parts.py",
    ),
    Mutation(
        "processing: a client's message closes a turn of the template",
        "jsg/processing/client_text.py",
        "return self._pattern.sub(lambda match: self.marks.around(self.WORDS, match[0]), value)",
        "return value",
        "tests/server/test_chat_prompt.py tests/server/test_bad_prompts.py",
    ),
    Mutation(
        "processing: a continuation loses its leading space",
        "jsg/processing/detokenizer.py",
        "            self._at_start = False\n",
        "",
        "tests/processing",
    ),
)

SCHED = (
    Mutation(
        "sched: a page that is not full is not counted",
        "jsg/sched/table.py",
        "return -(-num_tokens // self.page_size)",
        "return num_tokens // self.page_size",
        "tests/sched/test_groups.py tests/sched/test_scheduler.py",
    ),
    Mutation(
        "sched: the duplicates of a shared prefix stay with the row",
        "jsg/sched/table.py",
        "            self._allocator.free(duplicates)\n",
        "",
        "tests/sched/test_scheduler.py tests/sched/test_traffic.py",
    ),
    Mutation(
        "sched: the suffix of a joined request is put into the tree",
        "jsg/sched/table.py",
        "if not self._cache.enabled or place.branches or count",
        "if not self._cache.enabled or count",
        "tests/sched/test_joined.py",
    ),
    Mutation(
        "sched: the shortest cached prefix goes first",
        "jsg/sched/policy.py",
        "(-r.request.priority, -_watch(r).matched, r.arrival)",
        "(-r.request.priority, _watch(r).matched, r.arrival)",
        "tests/sched/test_scheduler.py tests/sched/test_bypass.py",
    ),
    Mutation(
        "sched: a change of the tree does not reorder the queue",
        "jsg/sched/waiting.py",
        "self._rekey([self._by_watch[watch.serial] for watch in self._cache.drain_changed()])",
        "self._cache.drain_changed()",
        "tests/sched/test_bypass.py tests/sched/test_waiting.py",
    ),
    Mutation(
        "sched: nobody was ever passed too often",
        "jsg/sched/bypass.py",
        "return self.bypassed(arrival) > self._bound",
        "return False",
        "tests/sched/test_bypass.py",
    ),
    Mutation(
        "sched: a retract teaches the estimate nothing",
        "jsg/sched/admission.py",
        "self.fraction = min(1.0, max(self.fraction, used / max(total, 1)))",
        "pass",
        "tests/sched/test_admission.py",
    ),
    Mutation(
        "sched: admission does not count what running requests will need",
        "jsg/sched/scheduler.py",
        "missing = num_pages + self._estimate.promised_pages - self.table",
        "missing = num_pages - self.table",
        "tests/sched/test_holds.py",
    ),
    Mutation(
        "sched: a chunk is larger than the budget",
        "jsg/sched/scheduler.py",
        "wanted = min(running.num_known - start, budget)",
        "wanted = min(running.num_known - start, budget + 1)",
        "tests/sched/test_scheduler.py",
    ),
    Mutation(
        "sched: the earliest arrival is retracted",
        "jsg/sched/scheduler.py",
        "victim = max(self.running, key=lambda r: r.arrival, default=None)",
        "victim = min(self.running, key=lambda r: r.arrival, default=None)",
        "tests/sched/test_scheduler.py",
    ),
    Mutation(
        "sched: a request is retracted while its step is in flight",
        "jsg/sched/scheduler.py",
        "        if self._num_in_flight or victim is None:",
        "        if victim is None:",
        "tests/sched/test_bypass.py tests/sched/test_scheduler.py",
    ),
    Mutation(
        "sched: the newest hold gives way first",
        "jsg/sched/holds.py",
        "zip(self._held.values(), range(count), strict=False)",
        "zip(reversed(self._held.values()), range(count), strict=False)",
        "tests/sched/test_holds.py",
    ),
    Mutation(
        "sched: an ended request keeps its state",
        "jsg/sched/lifecycle.py",
        "        running.enter(RequestState.ENDED)\n        if running.branch_of",
        "        if running.branch_of",
        "tests/sched/test_lifecycle.py",
    ),
    Mutation(
        "sched: the branches of an aborted joined request stay",
        "jsg/sched/lifecycle.py",
        "for branch in self.joins.remove(running).branches:",
        "for branch in self.joins.remove(running).branches[:0]:",
        "tests/sched/test_joined.py",
    ),
    Mutation(
        "sched: slots are copied in the step that writes them",
        "jsg/sched/joined.py",
        "if join.is_ready and size > 1:",
        "if False:",
        "tests/sched/test_joined.py",
    ),
    Mutation(
        "sched: a group shares a page too many",
        "jsg/sched/groups.py",
        "group.num_pages * page_size)",
        "(group.num_pages + 1) * page_size)",
        "tests/sched/test_groups.py",
    ),
    Mutation(
        "sched: tokens behind a jump are found as if there were none",
        "jsg/sched/positions.py",
        "return np.where(numbers > 0, ~(tokens + numbers * self._vocab_size), tokens).astype(np.int32)",
        "return tokens.astype(np.int32)",
        "tests/sched/test_position_jumps.py",
    ),
    Mutation(
        "sched: rows that the step reads are given to another image",
        "jsg/sched/vision_store.py",
        "needed = self._planned.union(self._pins.values())",
        "needed = set(self._pins.values())",
        "tests/sched/test_image_keys.py",
    ),
    Mutation(
        "sched: drafts are taken although the model disagrees",
        "jsg/sched/batch.py",
        "            if draft != token:\n                break\n",
        "",
        "tests/sched/test_traffic.py",
    ),
    Mutation(
        "sched: the last token of a prompt comes from the cache",
        "jsg/sched/request.py",
        "        return self.num_known - 1\n",
        "        return self.num_known\n",
        "tests/sched/test_scheduler.py",
    ),
    Mutation(
        "sched: a token of a stale entry counts",
        "jsg/sched/batch.py",
        "return self.running.place is not self.place",
        "return False",
        "tests/sched/test_scheduler.py",
    ),
)

SERVER = (
    Mutation(
        "server: a wrong key lets in",
        "jsg/server/http/access.py",
        "if hmac.compare_digest(known, digest):",
        "if True:",
        "tests/server/test_access.py",
    ),
    Mutation(
        "server: all keys are one tenant",
        "jsg/server/http/access.py",
        'hashlib.sha256(b"jsg tenant\\0" + key.encode())',
        'hashlib.sha256(b"jsg tenant\\0")',
        "tests/server/test_access.py tests/server/test_isolation.py",
    ),
    Mutation(
        "server: a stream has no end",
        "jsg/server/http/event_stream.py",
        'self._ending = b"" if named else b"data: [DONE]\\n\\n"',
        'self._ending = b""',
        "tests/server/test_generate.py tests/server/test_openai_completions.py",
    ),
    Mutation(
        "server: a line end inside an event is not escaped",
        "jsg/server/http/event_stream.py",
        "data = data.replace(raw, escaped)",
        "data = data",
        "tests/server",
    ),
    Mutation(
        "server: a failure in a stream is no event",
        "jsg/server/http/event_stream.py",
        "            await send_body(self._encode(self._failure(error)))\n",
        "",
        "tests/server/test_faults.py tests/server/test_generate.py",
    ),
    Mutation(
        "server: an answer that ended still counts for its key",
        "jsg/server/limits.py",
        "            self._under_way[tenant] -= 1\n",
        "            pass\n",
        "tests/server/test_limits.py",
    ),
    Mutation(
        "server: nothing bounds prompts times n",
        "jsg/server/generation.py",
        "if num_answers > MAX_ANSWERS:",
        "if False:",
        "tests/server",
    ),
    Mutation(
        "server: an error of the engine ends like an answer",
        "jsg/server/generation.py",
        "delta.finish.type is FinishType.ERROR:",
        "delta.finish.type is FinishType.STOP and False:",
        "tests/server/test_faults.py tests/server/test_generate.py",
    ),
    Mutation(
        "server: a stop string does not abort in the engine",
        "jsg/server/generation.py",
        "return  # at a stop string the engine does not know yet: closing `outputs` aborts the request",
        "pass",
        "tests/server",
    ),
)

MUTATIONS = (*CACHE, *CONSTRAINED, *DEVICE, *MODELS, *PROCESSING, *SCHED, *SERVER)
