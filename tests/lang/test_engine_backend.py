"""Programs' sessions on a real engine with the embedded model."""

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

import jsg
from jsg.constrained.compiler import compile_grammar
from jsg.constrained.run.vocab import Vocabulary
from jsg.engine.offline.lang_backend import EngineBackend
from jsg.errors import GrammarError, RequestError
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.ir import Gen, RoleBegin, RoleEnd, SamplingArgs, Select, Text
from jsg.types import GrammarSpec
from tests.constrained.vocabularies import sentencepiece, tekken, tokenize
from tests.lang.conftest import new_engine

GREEDY = SamplingArgs(temperature=0.0, max_tokens=8, ignore_eos=True)
CHOICES = (" girl", " boy", " girl who", " big dog", " boy")


@pytest.fixture
def backend(engine: jsg.Engine) -> EngineBackend:
    assert engine.flush_cache()
    return engine.as_backend()


async def started(backend: EngineBackend, text: str) -> TokenSession:
    session = backend.open()
    await session.extend(Text(text))
    return session


async def gen(session: TokenSession, **args: Any) -> tuple[str, dict[str, Any]]:
    pieces = [piece async for piece in session.generate(Gen("x", SamplingArgs(**args).over(GREEDY)))]
    meta = pieces[-1].meta
    assert meta is not None
    return "".join(piece.text for piece in pieces), meta


def exists_after(meta: dict[str, Any]) -> int:
    """Tokens whose keys and values exist behind a gen: all but the last one sampled, which nothing followed."""
    return meta["prompt_tokens"] + meta["completion_tokens"] - 1


def test_an_engine_is_always_the_same_backend(engine: jsg.Engine):
    assert engine.as_backend() is engine.as_backend()


@pytest.mark.parametrize("kind", ["gen", "select", "form"])
def test_an_empty_prompt_is_named_as_such_before_anything_else(engine: jsg.Engine, kind):
    @jsg.function
    def program(s):
        s += (
            jsg.select("x", ["a", "b"])
            if kind == "select"
            else jsg.gen("x", regex="(?=a)b" if kind == "form" else None)
        )

    for run in (program.run, program.compile().run):
        with pytest.raises(RequestError, match=r"the prompt is empty, .*; append text before"):
            run(backend=engine)["x"]


def test_a_program_that_saves_calls_of_an_api_runs_on_an_engine_as_without(engine: jsg.Engine):
    def body(s):
        s += (
            "There was a little girl"
            + jsg.gen("x", max_tokens=4, temperature=0)
            + "."
            + jsg.gen("y", max_tokens=4, temperature=0)
        )

    hinted = jsg.function(body, num_api_spec_tokens=32)
    for run in (hinted.run, hinted.compile().run):
        assert run(backend=engine).text() == jsg.function(body).run(backend=engine).text()


def test_an_engine_names_its_model_and_counts_as_a_server_does(engine: jsg.Engine):
    info = jsg.get_server_info(engine)
    assert (info["model_path"], info["tokenizer_path"]) == ("tiny", "tiny")
    assert info["internal_states"][0]["num_running"] == info["num_running"] == 0
    assert engine.model_info["model_path"] == "tiny" and engine.model_info["vocab_size"] == info["vocab_size"]


class TestReuse:
    async def test_f6_a_continuation_re_uses_every_token_that_exists(self, backend: EngineBackend):
        session = await started(backend, "There was a little girl")
        _, meta = await gen(session)
        for text in (" and then", "\n\nSo ", "x"):
            before = meta
            await session.extend(Text(text))
            _, meta = await gen(session)
            assert meta["cached_tokens"] == exists_after(before)

    async def test_f6_so_does_one_behind_a_stop_string_and_behind_the_end(self, backend: EngineBackend, engine):
        session = await started(backend, "There was a little girl")
        whole, _ = await gen(session, max_tokens=20)
        session = await started(backend, "There was a little girl")
        text, _ = await gen(session, max_tokens=20, stop=(whole[9:11],))
        assert text == whole.split(whole[9:11])[0]
        await session.extend(Text(" and"))
        kept = (await session._resolve())[0]
        _, meta = await gen(session)
        assert meta["cached_tokens"] >= len(kept.ids) - 1  # type: ignore[union-attr]
        chat = backend.open()
        await chat.extend(RoleBegin("user"))
        await chat.extend(Text("Hi"))
        await chat.extend(RoleEnd("user"))
        await chat.extend(RoleBegin("assistant"))
        _, meta = await gen(chat, ignore_eos=False, max_tokens=50)
        assert meta["finish_reason"] == {"type": "stop", "matched": engine.tokenizer.eos_token_id}
        await chat.extend(RoleEnd("assistant"))
        await chat.extend(RoleBegin("user"))
        _, after = await gen(chat)
        assert after["cached_tokens"] == exists_after(meta)

    async def test_f6_so_do_forks_and_forks_of_forks(self, backend: EngineBackend, engine: jsg.Engine):
        root = await started(backend, "There was a little girl who lived in")
        _, root_meta = await gen(root)
        await root.extend(Text(" a house. "))
        outer = await root.fork(3)
        for index, branch in enumerate(outer):
            await branch.extend(Text("abc"[index]))
        metas = [meta for _, meta in await asyncio.gather(*map(gen, outer))]
        common = len((await root._resolve())[0].ids)  # type: ignore[union-attr]
        assert common > exists_after(root_meta)
        assert [meta["cached_tokens"] for meta in metas] == [common] * 3, "the hint computed the common prompt, once"
        inner = [branch for parent in outer for branch in await parent.fork(2)]
        for index, branch in enumerate(inner):
            await branch.extend(Text("xy"[index % 2]))
        deep = [meta for _, meta in await asyncio.gather(*map(gen, inner))]
        for index, meta in enumerate(deep):
            parent = metas[index // 2]
            assert meta["cached_tokens"] == parent["prompt_tokens"] + parent["completion_tokens"]
        assert engine.get_server_info()["num_holds"] == 4
        for session in (*outer, *inner):
            await session.close()
        assert engine.get_server_info()["num_holds"] == 0

    async def test_a_hint_is_computed_when_it_returns(self, backend: EngineBackend, engine: jsg.Engine):
        session = await started(backend, "There was a little girl who lived in a house")
        await session.hint()
        await session.close()
        assert engine.get_server_info()["num_holds"] == 0
        again = await started(backend, "There was a little girl who lived in a house")
        await again.extend(Text(" of stone"))
        _, meta = await gen(again)
        assert meta["cached_tokens"] >= len(engine.tokenizer.encode("There was a little girl who lived in a house")) - 1

    def test_cache_computes_what_a_program_begins_with(self, backend: EngineBackend, engine: jsg.Engine):
        constant = "There was a little girl who lived in a house of stone. Her name was"

        @jsg.function
        def program(s, name):
            s += constant + name + jsg.gen("x", max_tokens=2)

        program.cache(backend)
        assert engine.get_server_info()["num_holds"] == 0
        meta = program.run(" Anna", backend=backend).get_meta_info("x")
        assert meta["cached_tokens"] == len(engine.tokenizer.encode(constant))
        assert meta["prompt_tokens"] > meta["cached_tokens"]

    async def test_a_joined_prompt_re_uses_its_branches(self, backend: EngineBackend, engine: jsg.Engine):
        session = await started(backend, "Facts: ")
        branches = await session.fork(2, [0, 100])
        for index, branch in enumerate(branches):
            await branch.extend(Text(f"the girl has number {index}."))
        metas = [meta for _, meta in await asyncio.gather(*map(gen, branches))]
        await session.join(branches)
        await session.extend(Text(" So"))
        text, meta = await gen(session)
        common = len((await session._resolve())[0].ids)  # type: ignore[union-attr]
        own = [m["prompt_tokens"] + m["completion_tokens"] - common for m in metas]
        assert meta["prompt_tokens"] == common + sum(own) + len(engine.tokenizer.encode(" So"))
        assert meta["cached_tokens"] == common + sum(own) - len(own), "the last token of each had not been computed"
        assert text
        for added in (" and", " but"):
            before = meta
            await session.extend(Text(added))
            _, meta = await gen(session)
            assert meta["cached_tokens"] == exists_after(before), "what is behind the branches is found too"
        await session.extend(Text(" now the girl"))
        forks = await session.fork(3)
        for index, fork in enumerate(forks):
            await fork.extend(Text("abc"[index]))
        metas = [meta for _, meta in await asyncio.gather(*map(gen, forks))]
        shared = metas[0]["prompt_tokens"] - 1
        assert sorted(meta["cached_tokens"] for meta in metas) == [exists_after(meta), shared, shared], "computed once"
        for each in (*branches, *forks):
            await each.close()


class TestSameAnswer:
    @pytest.mark.slow
    def test_f24_forks_and_hits_do_not_change_greedy_output(self, compile_cache_dir: str):
        async def run(backend: EngineBackend, *, cold: bool) -> list[str]:
            texts = []
            root = await started(backend, "There was a little girl who lived in")
            texts.append((await gen(root))[0])
            branches = await root.fork(2)
            for index, branch in enumerate(branches):
                await branch.extend(Text(f" a house. number {index}"))
            if cold:  # one by one, and each on an empty cache
                for branch in branches:
                    await branch._resolve()
                    for each in branches:
                        each._held, held = [], each._held
                        for prefix in held:
                            await prefix.release()
                    assert await backend.flush_cache()
                    texts.append((await gen(branch))[0])
            else:
                texts += [text for text, _ in await asyncio.gather(*map(gen, branches))]
            for branch in branches:
                await branch.close()
            return texts

        with new_engine(compile_cache_dir, deterministic=True) as engine:
            backend = engine.as_backend()
            warm = [asyncio.run(run(backend, cold=False)) for _ in range(2)]
            assert warm[0] == warm[1] == asyncio.run(run(backend, cold=True))


class TestAnswers:
    async def test_pieces_are_the_text_and_the_meta_is_that_of_generate(self, backend: EngineBackend, engine):
        session = await started(backend, "There was a little girl")
        text, meta = await gen(session, return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True)
        result = engine.generate(
            "There was a little girl",
            {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )
        assert text == result["text"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            assert [entry[1] for entry in meta[name]] == [entry[1] for entry in result["meta_info"][name]]
        assert "".join(entry[2] for entry in meta["output_token_logprobs"]) == text
        assert {"prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason", "output_ids"} <= meta.keys()

    async def test_several_answers_of_which_the_first_goes_on(self, backend: EngineBackend, engine: jsg.Engine):
        session = await started(backend, "There was a")
        pieces = [p async for p in session.generate(Gen("x", SamplingArgs(n=3, temperature=1.0, max_tokens=6, seed=4)))]
        text, others = "".join(p.text for p in pieces), pieces[-1].others
        assert len(others) == 2
        assert len({text, *others}) > 1
        await session.extend(Text("!"))
        await gen(session, return_logprob=True)
        first = (await session._resolve())[0]
        assert engine.tokenizer.decode(first.ids).startswith(f"There was a{text}!")

    async def test_patterns_schemas_and_types(self, backend: EngineBackend):
        session = await started(backend, "The number of girls is ")
        text, _ = await gen(session, dtype="int", max_tokens=20)
        assert int(text) >= 0 or text.startswith("-")
        await session.extend(Text(" and "))
        assert (await gen(session, regex="(red|blue)", max_tokens=20, ignore_eos=False))[0] in ("red", "blue")
        await session.extend(Text("\n"))
        schema = json.dumps(
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        )
        assert "a" in json.loads((await gen(session, json_schema=schema, max_tokens=40, ignore_eos=False))[0])
        await session.extend(Text("\n"))
        assert (await gen(session, ebnf='root ::= "x" "y"', max_tokens=20, ignore_eos=False))[0] == "xy"

    async def test_each_type_is_written_so_that_python_reads_it(self, backend: EngineBackend):
        values: dict[str, Any] = {}
        for dtype, prompt in (
            ("int", "1, 2, 3, "),
            ("float", "The price is "),
            ("bool", "1 + 1 = 2 is "),
            ("str", '{"name": "Tom"}\n{"name": "Anna"}\n{"name": '),
        ):
            session = await started(backend, prompt)
            values[dtype], _ = await gen(session, dtype=dtype, max_tokens=32, ignore_eos=False)
        assert isinstance(int(values["int"]), int) and isinstance(float(values["float"]), float)
        assert values["bool"] in ("True", "False")
        assert values["str"][0] == '"' and isinstance(json.loads(values["str"]), str)

    async def test_f11_a_string_that_the_model_writes_has_punctuation(self, backend: EngineBackend):
        session = await started(backend, "Anything: ")
        args = SamplingArgs(n=8, dtype="str", temperature=20.0, max_tokens=32, seed=1)  # any token that may stand there
        pieces = [piece async for piece in session.generate(Gen("x", args))]
        texts = ["".join(piece.text for piece in pieces), *pieces[-1].others]
        assert all(text[0] == '"' for text in texts)
        written = set("".join(text[1:].partition('"')[0] for text in texts))
        assert written & set(",.;:!?()-")

    @pytest.mark.parametrize("vocabulary", [tekken, sentencepiece])
    def test_f11_the_grammar_of_a_string_takes_punctuation(self, vocabulary: Callable[[], Vocabulary]):
        grammar = compile_grammar(GrammarSpec("regex", jsg.REGEX_STR), vocabulary())
        for text in ("Well, yes; (no?) - it's 100 %!", 'She said: "Hi."', "a\\b\n\tc", "Ärger in 東京 🙂"):
            for written in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
                masker = grammar.new_masker()
                assert all(masker.accept(token) for token in tokenize(grammar.vocabulary, written.encode()))
                assert masker.is_complete()
        masker = grammar.new_masker()
        assert not all(masker.accept(token) for token in tokenize(grammar.vocabulary, b'"a"b'))

    async def test_a_stop_pattern_ends_before_its_match(self, backend: EngineBackend):
        session = await started(backend, "There was a little girl")
        whole, _ = await gen(session, max_tokens=20)
        session = await started(backend, "There was a little girl")
        text, _ = await gen(session, max_tokens=20, stop_regex=("[aeiou]",))
        assert text == whole[: next(i for i, char in enumerate(whole) if char in "aeiou")]

    async def test_closing_a_gen_aborts_it(self, backend: EngineBackend, engine: jsg.Engine):
        session = await started(backend, "There was")
        pieces = session.generate(Gen("x", SamplingArgs(max_tokens=3000).over(GREEDY)))
        async for _ in pieces:
            break
        assert engine.get_server_info()["num_running"] == 1
        await pieces.aclose()
        assert engine.get_server_info()["num_running"] == 0

    async def test_a_wrong_call_says_what_is_wrong_and_the_session_goes_on(self, backend: EngineBackend):
        session = await started(backend, "There was")
        for args, error, message in (
            ({"temperature": -1.0}, RequestError, "temperature"),
            ({"regex": "("}, GrammarError, "a parenthesis is not closed"),
            ({"max_tokens": 10**6}, RequestError, "4096"),
            ({"regex": "a", "ebnf": "b"}, RequestError, "only one grammar"),
        ):
            with pytest.raises(error, match=message):
                await gen(session, **args)
        assert (await gen(session))[0]

    async def test_a_long_text_is_encoded_beside_the_loop(self, backend: EngineBackend):
        session = await started(backend, "word " * 5000)
        with pytest.raises(RequestError, match="must be at most 4096"):
            await gen(session)

    async def test_the_backend_tells_and_flushes(self, backend: EngineBackend):
        assert (await backend.server_info())["vocab_size"] and await backend.flush_cache()
        await backend.close()


class TestSelect:
    async def test_f16_probabilities_are_the_models_own(self, backend: EngineBackend, engine: jsg.Engine):
        session = await started(backend, "There was a little")
        selection = await session.select(Select("c", CHOICES, "token_trie"))
        tokenizer = engine.tokenizer
        prompt = tokenizer.encode("There was a little")
        tokens = [tokenizer.encode(f"There was a little{choice}")[len(prompt) :] for choice in CHOICES]
        masses = [brute_force_mass(engine, prompt, ids, tokens) for ids in tokens]
        expected = [mass / tokens.count(ids) for mass, ids in zip(masses, tokens, strict=True)]
        total = sum(expected)
        assert selection.probabilities == pytest.approx([mass / total for mass in expected], abs=1e-5)
        assert selection.choice == CHOICES[selection.probabilities.index(max(selection.probabilities))]
        assert selection.meta["id"] and selection.meta["e2e_latency"] > 0

    async def test_one_call_scores_and_the_prompt_is_cached_behind_it(
        self, backend: EngineBackend, engine: jsg.Engine, monkeypatch: pytest.MonkeyPatch
    ):
        num_calls = 0

        def counted(prompts: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return engine.answer_async(prompts)

        monkeypatch.setattr(backend._model, "_answer", counted)
        session = await started(backend, "There was a little")
        await gen(session)
        selection = await session.select(Select("c", (" a", " b", " c"), "token_trie"))
        assert num_calls == 2, "of the gen and of the choice"
        await session.extend(Text(" then"))
        _, meta = await gen(session)
        assert meta["cached_tokens"] >= selection.meta["prompt_tokens"] / 3 - 1

    @pytest.mark.parametrize(
        "stem_of_two", [" and her brother", ""], ids=["choices share two stems", "choices share one stem"]
    )
    async def test_a_stem_of_choices_is_computed_once(self, backend: EngineBackend, engine, stem_of_two: str):
        text, stem = "There was a little", " girl who lived in a house"
        ends = (" in the woods", " by the sea", stem_of_two + " and a dog", stem_of_two + " and two cats")
        choices = [stem + end for end in ends]
        session = await started(backend, text)
        selection = await session.select(Select("c", tuple(choices), "token_trie"))
        prompt = engine.tokenizer.encode(text)
        tokens = [engine.tokenizer.encode(text + choice) for choice in choices]
        assert all(ids[: len(prompt)] == prompt for ids in tokens)
        distinct = {tuple(ids[:end]) for ids in tokens for end in range(1, len(ids) + 1)}
        computed = selection.meta["prompt_tokens"] - selection.meta["cached_tokens"]
        assert computed == len(distinct)

    @pytest.mark.parametrize(
        "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
    )
    async def test_published_methods_report_what_they_saw(self, backend: EngineBackend, method: str):
        session = await started(backend, "There was a little")
        selection = await session.select(Select("c", CHOICES, method))
        assert selection.choice in CHOICES and sum(selection.probabilities or ()) == pytest.approx(1)
        shown = selection.meta["input_token_logprobs"]
        for choice, entries, mean in zip(CHOICES, shown, selection.meta["normalized_prompt_logprobs"], strict=True):
            assert "".join(text for _, _, text in entries) == choice, "no token of the prompt among them"
            assert mean == pytest.approx(sum(logprob for logprob, _, _ in entries) / len(entries))
        if method == "unconditional_likelihood_normalized":
            assert selection.meta["unconditional_token_logprobs"][0][0][0] is None
        if method == "greedy_token_selection":
            assert len(selection.meta["greedy_logprob_matrix"]) == len(CHOICES)

    async def test_a_choice_behind_joined_branches(self, backend: EngineBackend):
        session = await started(backend, "Facts: ")
        branches = await session.fork(2)
        for index, branch in enumerate(branches):
            await branch.extend(Text(f"the girl has number {index}."))
        await session.join(branches)
        await session.extend(Text(" So she is"))
        selection = await session.select(Select("c", (" good", " bad dog", " bad"), "token_trie"))
        assert sum(selection.probabilities or ()) == pytest.approx(1)
        for branch in branches:
            await branch.close()


def next_probabilities(engine: jsg.Engine, ids: list[int]) -> list[float]:
    """The whole distribution behind some tokens, asked for in pieces."""
    vocab = list(range(engine.info.vocab_size))
    table: dict[int, float] = {}
    for start in range(0, len(vocab), 128):
        answer = engine.generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
            token_ids_logprob=vocab[start : start + 128],
        )
        (chosen,) = answer["meta_info"]["output_token_ids_logprobs"]
        table |= {token: math.exp(logprob) for logprob, token, _ in chosen}
    assert sum(table.values()) == pytest.approx(1, abs=1e-4)
    return [table[token] for token in vocab]


def brute_force_mass(engine: jsg.Engine, prompt: list[int], ids: list[int], others: list[list[int]]) -> float:
    """The probability of all sequences that begin with `ids` and not with a longer one of the others, enumerated."""
    mass, done = 1.0, list(prompt)
    for token in ids:
        mass *= next_probabilities(engine, done)[token]
        done.append(token)
    longer = [other[len(ids) :] for other in others if len(other) > len(ids) and other[: len(ids)] == ids]
    return mass * outside(engine, done, longer)


def outside(engine: jsg.Engine, done: list[int], longer: list[list[int]]) -> float:
    """The probability of all that comes behind `done` and begins with none of `longer`."""
    if [] in longer:
        return 0.0
    if not longer:
        return 1.0
    return sum(
        p * outside(engine, [*done, token], [rest[1:] for rest in longer if rest[0] == token])
        for token, p in enumerate(next_probabilities(engine, done))
    )
