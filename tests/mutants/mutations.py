"""What `python -m tests.mutants` breaks: one line of the core of each package at a time."""

from tests.mutants.constrained import CONSTRAINED
from tests.mutants.kernels import KERNELS
from tests.mutants.mutation import Mutation
from tests.mutants.sched import SCHED

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
        "self.num_evictable += locked.num_pages\n                self.num_protected -= locked.num_pages\n        for",
        "pass\n        for",
        "tests/cache",
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
        "largest = xp.max(xp.abs(numbers), axis=1, keepdims=True)",
        "largest = xp.broadcast_to(xp.max(xp.abs(numbers)), (len(numbers), 1))",
        "tests/models/test_quantise.py",
    ),
    Mutation(
        "models: in 4 bits the second of two numbers is stored first",
        "jsg/models/quantise.py",
        "pairs[..., 0] | pairs[..., 1] << 4",
        "pairs[..., 1] | pairs[..., 0] << 4",
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
        "models: a norm leaves its epsilon out",
        "jsg/kernels_pallas/reference_rows.py",
        "keepdims=True) + eps)",
        "keepdims=True))",
        "tests/models tests/golden tests/kernels_pallas/test_rotate_and_write.py",
    ),
    Mutation(
        "models: a changed digest of a checkpoint is not seen",
        "jsg/models/orbax_checkpoint.py",
        "if hashlib.sha256(metadata[path]).hexdigest() != digest:",
        "if False:",
        "tests/models/test_orbax_checkpoint.py",
    ),
    Mutation(
        "models: the lines of an image have no end",
        "jsg/models/image_layout.py",
        "((0, 0), (0, 1)), constant_values=NEWLINE)",
        "((0, 0), (0, 0)), constant_values=NEWLINE)",
        "tests/models/test_image_layout.py",
    ),
    Mutation(
        "models: malloc is not told to give blocks back",
        "jsg/models/host_memory.py",
        "library.mallopt(M_MMAP_THRESHOLD, LARGE)",
        "pass",
        "tests/models/test_host_memory.py",
    ),
    Mutation(
        "models: malloc is never told to keep blocks again",
        "jsg/models/host_memory.py",
        "library.mallopt(M_MMAP_THRESHOLD, LARGEST)",
        "pass",
        "tests/models/test_host_memory.py",
    ),
    Mutation(
        "kernels: a query sees the token behind it",
        "jsg/kernels_pallas/reference.py",
        "seen = _seen(positions, kv_len - 1, scoring.window)",
        "seen = _seen(positions, kv_len - 2, scoring.window)",
        "tests/kernels_pallas/test_reference.py",
    ),
)

PROCESSING = (
    Mutation(
        "processing: pictures of the same header have one key",
        "jsg/processing/media/key.py",
        "    digest.update(np.ascontiguousarray(pixels).data)\n",
        "",
        "tests/processing/test_media_key.py",
    ),
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
        "processing: a mark in a string of JSON ends an argument",
        "jsg/processing/xml_call_reader.py",
        "if self._value.is_inside_json:",
        "if False:",
        "tests/processing/test_styled_calls.py",
    ),
    Mutation(
        "processing: an argument of any type is JSON",
        "jsg/processing/raw_value.py",
        "return json_of(held, self._types) or",
        "return json_of(held, ALL_TYPES) or",
        "tests/processing/test_styled_calls.py",
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
        "return  # closing `outputs` aborts the request: of a stop string the engine does not know yet",
        "pass",
        "tests/server",
    ),
)

MUTATIONS = (*CACHE, *CONSTRAINED, *DEVICE, *MODELS, *KERNELS, *PROCESSING, *SCHED, *SERVER)
