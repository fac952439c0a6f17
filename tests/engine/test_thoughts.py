"""Thoughts before answers: grammars begin behind them, and limits end them, in all modes and however outputs come."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from jsg.constrained.compiler import compile_tables
from jsg.engine.core import EngineCore
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.server.http.field_rules import FieldRules
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.answers.thoughts import MARKERS
from jsg.speech.rules.thinking import ThoughtForm, ThoughtWish, think
from jsg.types import FinishType, GrammarSpec, JumpForward, SamplingParams
from tests.engine import small, thinking_model
from tests.engine.thinking_model import BEGIN, END, THOUGHT, Kind

NUM_TOKENS = len(THOUGHT.encode())
BUDGETS = (None, 0, 1, 2, 13, 26, 27, 28, 29, 30, NUM_TOKENS - 1, NUM_TOKENS, 1000)
JUMPS: tuple[JumpForward, ...] = ("draft", "retokenize", "off")
RULES = FieldRules(is_strict=True)


@dataclasses.dataclass
class Thinker:
    """An engine of the model that thinks, and what the front knows of the model."""

    core: EngineCore
    tokenizer: Tokenizer
    form: ThoughtForm
    ends_by_itself: bool

    @property
    def budgets(self) -> list[int | None]:
        """The limits to try. A model whose markers are no tokens does not write one by itself."""
        return [each for each in BUDGETS if self.ends_by_itself or (each is not None and each <= NUM_TOKENS)]

    def cases(self, index: int) -> list[tuple[int | None, JumpForward, bool]]:
        return [(self.budgets[index % len(self.budgets)], JUMPS[index % 3], index % 2 == 0)]

    def prompt(self, rid: str, wish: ThoughtWish, *, opening: str = f"hi\n{BEGIN}\n", **sampling: Any) -> Prompt:
        fields = {"max_new_tokens": 200, "temperature": 0.0, **sampling}
        prompt = Prompt(
            rid=rid,
            input_ids=tuple(self.tokenizer.encode(opening)),
            sampling=SamplingParams.from_dict(fields),
            is_continued=False,
        )
        return think(prompt, self.form, wish, RULES.pass_over)

    def answers(self, prompts: list[Prompt], *, streamed: bool = True) -> dict[str, Answer]:
        """The answers, as the engine gives them with all prompts under way at once."""
        answers: dict[str, Answer] = {}
        for prompt in prompts:
            (answer,) = prompt.answers(self.tokenizer, 3, small.VOCAB, None)
            answers[prompt.rid] = answer
            grammar = answer.request.sampling.grammar
            if isinstance(grammar, GrammarSpec):
                self.core.grammars.add_grammar(grammar.key, compile_tables(grammar).to_bytes())
            self.core.add(dataclasses.replace(answer.request, is_streamed=streamed))
        while self.core.has_work:
            for output in self.core.step():
                answers[output.rid].push(output)
        return answers


@pytest.fixture(scope="module", params=["special", "added", "text"])
def thinker(request, tmp_path_factory, compile_cache_dir: str) -> Iterator[Thinker]:
    kind: Kind = request.param
    directory: pathlib.Path = thinking_model.write_model(tmp_path_factory.mktemp("thinking"), kind)
    core = small.make_core(directory, compile_cache_dir, load_format="safetensors", deterministic=True)
    tokenizer = load_tokenizer(directory)
    special = {text for text in (BEGIN, END) if kind == "special"}
    yield Thinker(core, tokenizer, ThoughtForm(MARKERS["qwen3"], tokenizer, special), kind != "text")
    core.close()


def whole(budget: int | None) -> str:
    """The thought that a budget leaves, without the white space at its end."""
    if budget is None or budget >= NUM_TOKENS:
        return THOUGHT
    ends = list(itertools.accumulate(len(char.encode()) for char in THOUGHT))
    return "".join(char for char, end in zip(THOUGHT, ends, strict=True) if end - len(char.encode()) < budget)


def random_schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts are short."""
    kinds = ["integer", "boolean", "enum", "string", "null"] + ["object", "array"] * (depth > 0)
    match rng.choice(kinds):
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": int(rng.integers(1, 1000))}
        case "enum":
            return {"enum": [f"{word}{rng.integers(100)}" for word in ("red", "tea", "zoo")]}
        case "string":
            return {"type": "string", "maxLength": int(rng.integers(0, 9))}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": int(rng.integers(0, 3))}
        case "object":
            names = [f"{name}{rng.integers(10)}" for name in ("name", "key", "a")][: rng.integers(1, 4)]
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": names,
                "additionalProperties": False,
            }
        case kind:
            return {"type": str(kind)}


def check(thinker: Thinker, schemas: list[dict[str, Any]], cases: list[tuple[int | None, JumpForward, bool]]) -> None:
    """Runs each schema in each case, and checks the thoughts, their number and the answers."""
    for streamed in (True, False):
        told = {
            f"{i}-{j}": (schema, budget, jump)
            for i, schema in enumerate(schemas)
            for j, (budget, jump, is_streamed) in enumerate(cases)
            if is_streamed is streamed
        }
        prompts = [
            thinker.prompt(rid, ThoughtWish(budget=budget), json_schema=schema, jump_forward=jump)
            for rid, (schema, budget, jump) in told.items()
        ]
        for rid, answer in thinker.answers(prompts, streamed=streamed).items():
            schema, budget, jump = told[rid]
            assert answer.finish is not None and answer.finish.type is FinishType.STOP, (schema, answer.text)
            jsonschema.validate(json.loads(answer.text), schema)
            assert answer.thoughts == whole(budget), (budget, jump)
            assert answer.num_thought_tokens == len(answer.thoughts.encode())
            assert budget is None or answer.num_thought_tokens <= max(budget, 0) + 2  # a character is completed


def test_answers_match_and_thoughts_are_untouched(thinker: Thinker):
    rng = np.random.default_rng(1)
    for index in range(len(BUDGETS)):
        check(thinker, [random_schema(rng)], thinker.cases(index))


@pytest.mark.slow
@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.long)])
def test_many_schemas(thinker: Thinker, count: int):
    rng = np.random.default_rng(count)
    by_case: dict[int, list[dict[str, Any]]] = {}
    for index in range(count):
        by_case.setdefault(index % (6 * len(BUDGETS)), []).append(random_schema(rng))
    for index, schemas in by_case.items():
        check(thinker, schemas, thinker.cases(index))


@pytest.mark.long
def test_a_hundred_schemas_in_every_case(thinker: Thinker):
    rng = np.random.default_rng(3)
    cases = list(itertools.product(thinker.budgets, JUMPS, (True, False)))
    for _ in range(100):
        check(thinker, [random_schema(rng)], cases)


def test_a_limit_without_a_grammar(thinker: Thinker):
    """The answer is free text then."""
    prompts = [thinker.prompt(f"{n}", ThoughtWish(budget=n), max_new_tokens=60) for n in (0, 5, 27)]
    for rid, answer in thinker.answers(prompts).items():
        assert answer.thoughts == whole(int(rid))
        assert answer.text and len(answer.token_ids) == 60


def test_what_the_prompt_says_of_thoughts(thinker: Thinker):
    """A prompt may have opened the thoughts, have ended them, or leave them to the model."""
    schema = {"enum": ["red", "blue"]}
    openings = {"opened": f"hi\n{BEGIN}\n", "ended": f"hi\n{BEGIN}\n\n{END}\n\n", "left": "hi\n"}
    prompts = [
        thinker.prompt(rid, ThoughtWish(budget=None if rid == "ended" else 7), opening=opening, json_schema=schema)
        for rid, opening in openings.items()
    ]
    answers = thinker.answers(prompts)
    assert (answers["opened"].thoughts, answers["ended"].thoughts) == (THOUGHT[:7], "")
    assert len(answers["left"].thoughts) in (0, 7)
    assert all(json.loads(answer.text) in ("red", "blue") for answer in answers.values())


@pytest.mark.parametrize("jump", JUMPS)
def test_a_begin_marker_in_a_draft_is_under_the_limit(thinker: Thinker, jump: JumpForward):
    """Where the model must open its thoughts itself, forced text may complete the marker."""
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "so"}}
    prompt = thinker.prompt("a", ThoughtWish(budget=0), opening="hi\n", structural_tag=tag, jump_forward=jump)
    begin = thinker.tokenizer.encode(BEGIN, add_special_tokens=False)[0]
    prompt = dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, logit_bias=((begin, 100.0),)))
    answer = thinker.answers([prompt])["a"]
    assert (answer.thoughts, answer.text, answer.num_thought_tokens) == ("", "so", 0)
    assert answer.token_ids[0] == begin


def test_thoughts_that_are_not_split_stand_in_the_text(thinker: Thinker):
    prompt = thinker.prompt("a", ThoughtWish(budget=3, is_split=False), regex="[0-9]{2}")
    answer = thinker.answers([prompt])["a"]
    assert answer.text[:-2] == f"abc{END}\n\n" and answer.text[-2:].isdecimal()
    assert (answer.thoughts, answer.num_thought_tokens) == ("", 3)
