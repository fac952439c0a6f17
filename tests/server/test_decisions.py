"""`/v1/decisions` and `/v1/systemone`, with the real engine of a small random model whose tokens are bytes."""

import concurrent.futures
import contextlib
import inspect
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
from openai.resources import Decisions

from jsg.config import EngineConfig
from jsg.engine.core import EngineCore
from jsg.errors import RequestError
from jsg.processing.tokenizer import load_tokenizer
from jsg.server.http.failures import json_response
from jsg.server.openai.decisions_body import DecisionsBody
from jsg.server.shared.deciding import before_answer
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.prompts.turns import ChatTurns
from tests.engine.late import late_programs
from tests.server import threads
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.real_model import write_real_model
from tests.server.running import RunningServer
from tests.server.scripted import TOOL_TEMPLATE, ScriptedServer
from tests.server.threads import ServerMaker
from tests.speech.prompts import chat_templates

MAX_DIFFERENCE = 1e-5
TICKET = "My card was charged twice for order 17."
TEAMS = ["billing", "bill", "technical", "b"]
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "paid", "instructions": "The customer paid twice."},
    {"type": "choice", "instructions": "Which team?", "choices": [{"value": team} for team in TEAMS]},
    {"type": "score", "name": "anger", "instructions": "How angry?", "levels": [{"label": x} for x in ("0", "1", "2")]},
]

SWITCHED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{{ '/nothink' if enable_thinking is "
    "defined and not enable_thinking else '' }}{% else %}<|assistant|>{{ '\n<think></think>' }}{{ '\n' + m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
)
"""As GLM-4.5's."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_model(tmp_path_factory.mktemp("decisions") / "model")


@contextlib.contextmanager
def serving(make_server: ServerMaker, directory: Path, cache_dir: str, **server: Any) -> Iterator[RunningServer]:
    knobs = {"model_path": str(directory), "max_total_tokens": 16384, "max_running_requests": 16}
    knobs |= {"deterministic": True, "compilation_cache_dir": cache_dir, "forbid_compile": True}

    def real_core(config: EngineConfig, _engine: object, report: Any) -> EngineCore:
        return EngineCore(config, report=report)

    with late_programs(), contextlib.ExitStack() as stack:
        with mock.patch.object(threads, "_ThreadCore", real_core):  # while it starts
            made = stack.enter_context(make_server(engine=knobs, server=server, tokenizer=directory))
        yield made


@pytest.fixture(scope="module")
def deciding(make_server: ServerMaker, directory: Path, compile_cache_dir: str) -> Iterator[RunningServer]:
    with serving(make_server, directory, compile_cache_dir) as server:
        yield server


@pytest.fixture
def cold(deciding: RunningServer) -> RunningServer:
    assert deciding.http.post("/flush_cache").status_code == 200
    return deciding


def decide(server: RunningServer, **body: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/decisions", json={"input": TICKET, "questions": QUESTIONS} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(server: RunningServer, text: str) -> list[int]:
    return server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def mass_of(server: RunningServer, prompt: str, label: str) -> float:
    """The probability that the answer begins with a label, from the log-probabilities of `/generate`."""
    before = ids_of(server, prompt)
    body = {
        "input_ids": before + ids_of(server, label),
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(before),
    }
    scored = server.http.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"]
    return math.exp(math.fsum(entry[0] for entry in scored))


def enumerated(server: RunningServer, prompt: str, labels: Sequence[str]) -> tuple[list[float], float]:
    """The share of each label in all answers, of which each counts for the longest label that it begins with."""
    begun = {label: mass_of(server, prompt, label) for label in labels}
    for label in sorted(labels, key=len):  # takes what belongs to a longer label from the longest one it begins with
        shorter = [other for other in labels if other != label and label.startswith(other)]
        if shorter:
            begun[max(shorter, key=len)] -= mass_of(server, prompt, label)
    total = math.fsum(begun.values())
    return [begun[label] / total for label in labels], total


def asked(question: str) -> str:
    return f"<|im_start|>user\n{TICKET}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_probabilities_are_those_of_all_answers_enumerated(cold: RunningServer) -> None:
    paid, team, anger = decide(cold)["answers"]
    (yes, _), mass = enumerated(cold, asked("The customer paid twice.\nAnswer Yes or No."), ["Yes", "No"])
    assert paid == {
        "type": "predicate",
        "name": "paid",
        "probability": pytest.approx(yes, abs=MAX_DIFFERENCE),
        "label_mass": pytest.approx(mass, rel=MAX_DIFFERENCE),
    }
    shares, mass = enumerated(cold, asked("Which team?\nAnswer with one of these:\n- " + "\n- ".join(TEAMS)), TEAMS)
    assert [entry["value"] for entry in team["probabilities"]] == TEAMS
    assert [entry["probability"] for entry in team["probabilities"]] == pytest.approx(shares, abs=MAX_DIFFERENCE)
    assert team["choice"] == TEAMS[shares.index(max(shares))]
    assert team["label_mass"] == pytest.approx(mass, rel=MAX_DIFFERENCE) and team["name"] is None
    text = "How angry?\nAnswer with one of these levels, the lowest first:\n- 0\n- 1\n- 2"
    shares, _ = enumerated(cold, asked(text), ["0", "1", "2"])
    assert anger["score"] == pytest.approx(shares[1] + 2 * shares[2], abs=MAX_DIFFERENCE)
    assert [(entry["value"], entry["label"]) for entry in anger["probabilities"]] == [(0, "0"), (1, "1"), (2, "2")]


def test_answers_are_bitwise_equal_cold_cached_and_beside_others(cold: RunningServer) -> None:
    first = decide(cold)
    again = decide(cold)
    assert first["usage"]["input_tokens_details"]["cached_tokens"] < 10, "what the questions have in common"
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"] / 2
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        crowd = list(pool.map(lambda _: decide(cold), range(4)))
    alone = [decide(cold, questions=[question])["answers"][0] for question in QUESTIONS]
    for answers in (again["answers"], alone, *(each["answers"] for each in crowd)):
        assert answers == first["answers"]


def test_the_input_is_computed_once(cold: RunningServer) -> None:
    text = "The same long text. " * 20
    before = computed(cold)
    usage = decide(cold, input=text, questions=QUESTIONS[:1] * 12)["usage"]
    num_input = len(ids_of(cold, text))
    assert num_input < usage["input_tokens"] < num_input + 12 * 100
    assert usage["input_tokens_details"]["cache_write_tokens"] == computed(cold) - before
    assert usage["input_tokens_details"]["cache_write_tokens"] < num_input + 12 * 20, "equal questions share too"
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    assert decide(cold, input=text)["usage"]["input_tokens_details"]["cached_tokens"] >= num_input


def computed(server: RunningServer) -> int:
    """The tokens of prompts that were computed, as `/metrics` counts them."""
    values: dict[str, float] = {}
    for line in server.http.get("/metrics", headers={"Cache-Control": "no-cache"}).text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            values[name.split("{")[0]] = values.get(name.split("{")[0], 0) + float(value)
    return int(values["jsg:prompt_tokens_total"] - values["jsg:cached_tokens_total"])


@pytest.mark.slow
def test_400_questions_and_255_choices(cold: RunningServer) -> None:
    values = [f"{index:03}" for index in range(255)]
    many = {"type": "choice", "instructions": "?", "choices": [{"value": value} for value in values]}
    (answer,) = decide(cold, questions=[many])["answers"]
    assert math.fsum(entry["probability"] for entry in answer["probabilities"]) == pytest.approx(1)
    questions = [{"type": "predicate", "name": str(index), "instructions": f"{index}?"} for index in range(400)]
    done = decide(cold, questions=questions)
    assert [answer["name"] for answer in done["answers"]] == [str(index) for index in range(400)]
    for index in (0, 399):
        assert decide(cold, questions=[questions[index]])["answers"] == [done["answers"][index]]
    usage = done["usage"]
    assert usage["input_tokens_details"]["cache_write_tokens"] <= usage["input_tokens"] + 400 * 2
    answer = cold.http.post("/v1/decisions", json={"input": "a", "questions": questions + questions[:1]})
    assert answer.status_code == 400 and "400" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_questions_that_are_too_many_for_one_generation_follow(
    make_server: ServerMaker, directory: Path, compile_cache_dir: str, deciding: RunningServer
) -> None:
    """So do the requests of one question that needs more of them than a key may have at once."""
    calibrated = {"max_requests_per_key": 5, "decision_temperature": 2.0}
    words = map("".join, itertools.product("abcdef", "xy", "12"))
    large = {"type": "choice", "instructions": "Which?", "choices": [{"value": word} for word in words]}
    with serving(make_server, directory, compile_cache_dir, **calibrated) as server:
        answers = decide(server, questions=[*QUESTIONS[:1] * 6, large])["answers"]
    paid, chosen = decide(deciding, questions=[QUESTIONS[0], large])["answers"]
    p = paid["probability"]
    root = math.sqrt(p) / (math.sqrt(p) + math.sqrt(1 - p))
    assert [answer["probability"] for answer in answers[:6]] == pytest.approx([root] * 6)
    roots = [math.sqrt(entry["probability"]) for entry in chosen["probabilities"]]
    shares = [each / math.fsum(roots) for each in roots]
    assert [entry["probability"] for entry in answers[6]["probabilities"]] == pytest.approx(shares)


def test_the_official_client_reads_every_answer(deciding: RunningServer) -> None:
    choices: Any = [{"value": "true"}, {"value": True, "description": "It is so."}, {"value": "other"}]
    questions: Any = [*QUESTIONS, {"type": "choice", "name": "typed", "instructions": "So?", "choices": choices}]
    with openai.OpenAI(base_url=f"{deciding.http.base_url}/v1", api_key="none", max_retries=0) as client:
        done = client.decisions.create(
            model="default",
            input=[
                {"role": "developer", "content": "Be strict."},
                {"role": "user", "content": [{"type": "input_text", "text": TICKET}]},
                {"role": "user", "content": [{"type": "input_json", "data": {"order": 17}}]},
            ],
            questions=questions,
            prompt_cache_key="a",
            prompt_cache_options={"mode": "implicit", "ttl": "30m"},
            safety_identifier="me",
        )
    paid, team, anger, typed = done.answers
    assert paid.type == "predicate" and 0 < paid.probability < 1
    assert 0 < (paid.model_extra or {})["label_mass"] < 1
    assert team.type == "choice" and team.choice in TEAMS
    assert 0 <= team.confidence <= 1
    assert anger.type == "score" and 0 <= anger.score <= 2
    assert typed.type == "choice"
    assert [entry.value for entry in typed.probabilities] == ["true", True, "other"]
    assert done.usage.total_tokens == done.usage.input_tokens
    assert done.usage.output_tokens_details.reasoning_tokens == 0
    assert done.model == deciding.http.get("/v1/models").json()["data"][0]["id"]


def test_system_one_is_the_same_in_another_form(deciding: RunningServer) -> None:
    body = {
        "state": TICKET,
        "model": "default",
        "questions": {
            "paid": {"type": "noul", "instructions": "The customer paid twice."},
            "team": {"type": "choice", "instructions": "Which team?", "criteria": dict.fromkeys(TEAMS)},
            "anger": {"type": "score", "instructions": "How angry?", "criteria": ["0", "1", "2"]},
        },
    }
    done = deciding.http.post("/v1/systemone", json=body).json()
    paid, team, anger = decide(deciding)["answers"]
    assert done["answers"]["paid"] == {
        "type": "noul",
        "noul": paid["probability"],
        "label_mass": paid["label_mass"],
    }
    assert done["answers"]["team"] == {
        "type": "choice",
        "choice": team["choice"],
        "confidence": team["confidence"],
        "probabilities": {entry["value"]: entry["probability"] for entry in team["probabilities"]},
        "label_mass": team["label_mass"],
    }
    assert done["answers"]["anger"]["score"] == anger["score"]
    assert done["answers"]["anger"]["legend"] == {"0": "0", "1": "1", "2": "2"}
    assert done["usage"]["output_tokens"] == 0
    described = {"type": "noul", "criteria": {"true": "He paid.", "false": {"why": "He did not."}}}
    body |= {"state": {"ticket": TICKET, "order": [17]}, "questions": {"paid": described}}
    assert 0 < deciding.http.post("/v1/systemone", json=body).json()["answers"]["paid"]["noul"] < 1


@pytest.mark.slow
def test_a_model_without_a_chat_template_reads_plain_text(
    make_server: ServerMaker, directory: Path, compile_cache_dir: str, deciding: RunningServer, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(directory / name)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "<|im_end|>"}')
    with serving(make_server, tmp_path, compile_cache_dir) as server:
        (answer,) = decide(server, questions=QUESTIONS[:1])["answers"]
        picture = {"type": "input_image", "image_url": "data:"}
        for role, content in (("system", "a"), ("user", [picture])):
            body = {"input": [{"role": role, "content": content}], "questions": QUESTIONS}
            refused = server.http.post("/v1/decisions", json=body)
            assert "input must be text of the user" in refused.json()["error"]["message"]
    prompt = f"{TICKET}\n\nThe customer paid twice.\nAnswer Yes or No.\nAnswer:"
    (yes, _), _ = enumerated(deciding, prompt, [" Yes", " No"])
    assert answer["probability"] == pytest.approx(yes, abs=MAX_DIFFERENCE)


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"questions": []}, "questions", "at least 1"),
        ({"questions": [QUESTIONS[1] | {"choices": [{"value": "a"}]}]}, "questions[0].choices", "2 to 255 items"),
        (
            {"questions": [QUESTIONS[1] | {"choices": [{"value": str(i)} for i in range(256)]}]},
            "questions[0].choices",
            "has 256",
        ),
        (
            {"questions": [QUESTIONS[0], QUESTIONS[1] | {"choices": [{"value": True}, {"value": True}]}]},
            "questions[1].choices",
            "must be different, but 'true' is there twice",
        ),
        ({"questions": [QUESTIONS[2] | {"levels": [{"label": "a"}]}]}, "questions[0].levels", "2 to 255 items"),
        ({"questions": [QUESTIONS[2] | {"levels": [{"label": "a"}, {"label": ""}]}]}, "questions[0].levels", "[1]"),
        ({"questions": [QUESTIONS[0] | {"choices": [{"value": "a"}]}]}, "questions", "must not have choices"),
        ({"questions": [{"type": "choice", "instructions": "a"}]}, "questions", "must have choices"),
        (
            {"questions": [{"type": "predicate", "instructions": [{"type": "input_image", "image_url": "data:"}]}]},
            "questions[0].instructions",
            "send the picture in the input",
        ),
        ({"input": []}, "input", "at least 1"),
        ({"input": [CALL | {"namespace": "n"}]}, "namespace", "write it into name"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input", "add the call"),
        (
            {"input": [CALL, {"type": "custom_tool_call_output", "call_id": "c", "output": "a"}]},
            "input",
            "result of a custom_tool_call before it",
        ),
        ({"input": [CALL]}, "input", "no place for the field tool_calls"),
        ({"input": "x" * 70_000}, "input", "at most"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input", "see"),
        ({"model": "gpt-6-luna"}, "model", "served here"),
    ],
)
def test_what_is_refused(deciding: RunningServer, body: dict[str, Any], param: str, said: str) -> None:
    answer = deciding.http.post("/v1/decisions", json={"input": TICKET, "questions": QUESTIONS} | body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"type": "noul"}, "must have instructions or criteria"),
        ({"type": "noul", "criteria": {"maybe": "a"}}, "but has 'maybe'"),
        ({"type": "choice", "criteria": ["a"]}, "must be an object"),
        ({"type": "choice"}, "must be an object"),
        ({"type": "score", "criteria": {"a": None}}, "must be a list"),
        ({"type": "score", "criteria": ["a"]}, "2 to 255 items"),
    ],
)
def test_what_system_one_refuses(deciding: RunningServer, question: dict[str, Any], said: str) -> None:
    answer = deciding.http.post("/v1/systemone", json={"state": "a", "questions": {"q": question}})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("questions.q")


@pytest.mark.parametrize(
    ("name", "before", "behind", "blank"),
    [
        ("CHATML", "user\nI", "<|im_end|>\n<|im_start|>assistant\n", ""),
        ("FOLDED", "<s>[INST] I", " [/INST]", " "),
        ("MOVING", "[INST]S\n\nI", "[/INST]", " "),
        ("REASONING", "<|User|>I", "<|Assistant|>", ""),
        ("WORDS", "USER: I", " ASSISTANT:", " "),
        ("PARTS", "<|user|>I", "<|end|><|assistant|>", ""),
    ],
)
def test_a_label_stands_where_the_template_writes_a_given_answer(
    tmp_path: Path, name: str, before: str, behind: str, blank: str
) -> None:
    write_byte_tokenizer(tmp_path, getattr(chat_templates, name))
    tokenizer = load_tokenizer(tmp_path)
    messages = [*({"role": role, "content": role[0].upper()} for role in ("system", "user", "assistant"))]
    prompt, rest = ChatPrompt(tokenizer).until_end([*messages, {"role": "user", "content": "I"}])
    assert tokenizer.decode(prompt.input_ids, skip_special_tokens=False).endswith(before)
    assert before_answer(lambda: ChatTurns.of_tokenizer(tokenizer), rest) == (behind, blank)


def test_a_label_stands_behind_thoughts_that_were_ended_as_a_given_answer_does(tmp_path: Path) -> None:
    """GLM-4.5 writes a line break before a given answer, but leaves it to the model behind a prompt."""
    write_byte_tokenizer(tmp_path, SWITCHED)
    server = ScriptedServer(tmp_path)
    server.engine.score = lambda ids, index: -1.0
    answer = server.http.post("/v1/decisions", json={"input": "a", "questions": QUESTIONS[:1]})
    assert answer.status_code == 200, answer.text
    shown = server.tokenizer.decode(server.engine.requests[0].input_ids, skip_special_tokens=False)
    assert "Yes or No./nothink<|assistant|>\n<think></think>\n" in shown


def test_long_arithmetic_and_long_responses_are_made_beside_the_event_loop(tmp_path: Path, monkeypatch: Any) -> None:
    write_byte_tokenizer(tmp_path, SWITCHED)
    server = ScriptedServer(tmp_path)
    server.engine.score = lambda ids, index: -1.0
    names: list[str] = []
    for path in ("jsg.server.openai.decisions.json_response", "jsg.server.native.systemone.json_response"):
        monkeypatch.setattr(path, lambda body: names.append(threading.current_thread().name) or json_response(body))
    levels = [str(level) for level in range(100)]
    question = {"type": "score", "instructions": "How?", "levels": [{"label": level} for level in levels]}
    assert server.http.post("/v1/decisions", json={"input": "a", "questions": [question]}).status_code == 200
    asked = {"type": "score", "criteria": levels}
    assert server.http.post("/v1/systemone", json={"state": "a", "questions": {"q": asked}}).status_code == 200
    assert [name.partition("_")[0] for name in names] == ["jsg-text"] * 2


def test_a_template_that_repeats_or_moves_the_last_content_is_refused(tmp_path: Path) -> None:
    for template in (
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}{{ messages[0].content }}",
    ):
        write_byte_tokenizer(tmp_path, template)
        chat = ChatPrompt(load_tokenizer(tmp_path))
        with pytest.raises(RequestError, match="must stand in the prompt in their order"):
            chat.until_end([{"role": "system", "content": "<|im_end|>"}, {"role": "user", "content": "a"}])


def test_every_item_of_openai_stands_in_the_prompt(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, TOOL_TEMPLATE)
    server = ScriptedServer(tmp_path)
    server.engine.score = lambda ids, index: -1.0
    items = [
        {"role": "developer", "content": "D", "type": "message"},
        {"role": "user", "content": [{"type": "input_text", "text": "T"}, {"type": "input_json", "data": {"a": [1]}}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "R"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "free <|im_end|>", "id": "i"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "S"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}, {"type": "refusal", "refusal": "N"}]},
        {"role": "system", "content": "Y"},
    ]
    instructions = [{"type": "input_text", "text": "<|im_end|> so? "}, {"type": "input_json", "data": [{"b": None}]}]
    body = {"input": items, "questions": [{"type": "predicate", "instructions": instructions}]}
    answer = server.http.post("/v1/decisions", json=body)
    assert answer.status_code == 200, answer.text
    shown = server.tokenizer.decode(server.engine.requests[0].input_ids, skip_special_tokens=False)
    assert shown.startswith(
        '<|im_start|>system\nD<|im_end|>\n<|im_start|>user\nT{"a":[1]}<|im_end|>\n'
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nc: R<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "g", "arguments": {"input": "free <|im_end|>"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\nd: S<|im_end|>\n<|im_start|>assistant\nAN<|im_end|>\n"
        '<|im_start|>system\nY<|im_end|>\n<|im_start|>user\n<|im_end|> so? [{"b":null}]\nAnswer Yes or No.<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    end = server.tokenizer.token_id("<|im_end|>")
    assert server.engine.requests[0].input_ids.count(end) == 9, "words of clients are never special tokens"


def test_every_argument_of_the_clients_method_has_an_answer() -> None:
    offered = set(inspect.signature(Decisions.create).parameters)
    offered -= {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert offered <= DecisionsBody.model_fields.keys() | DecisionsBody.HARMLESS.keys()
