"""Programs in the shapes of the published benchmarks: they run as they are, their imports aside."""

import ast
import asyncio
import collections
import inspect
import itertools
import json
import re

import pytest

import jsg
from jsg.lang.words.ir import Gen, SamplingArgs
from tests.lang import ported_programs as ported
from tests.lang.graph_programs import answer
from tests.lang.graph_programs import backend as backend_of_graphs
from tests.lang.scripted import Gate, ScriptedBackend, numbered

PNG = b"\x89PNG\r\n\x1a\n" + b"."
PUBLISHED = frozenset(
    "function gen gen_int gen_string select system system_begin system_end user user_begin user_end assistant "
    "assistant_begin assistant_end image video separate_reasoning".split()
)
GEN_ARGUMENTS = frozenset(
    "name max_tokens min_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
    "presence_penalty ignore_eos return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs dtype "
    "choices choices_method regex json_schema".split()
)
DEEP = ("plan", "answer", "score", "final_answer")


def named() -> ScriptedBackend:
    """Answers with the name of the gen."""
    return ScriptedBackend(lambda prompt, gen: f"<{gen.name}>")


def backend_of_forms() -> ScriptedBackend:
    """Answers as the prompt decides, and with a value where the gen wants one."""
    values = {jsg.REGEX_STR: '"Oslo"', jsg.REGEX_INT: "480", jsg.REGEX_FLOAT: "59.9"}
    return backend_of_graphs(lambda prompt, gen: values.get(gen.args.regex or "") or answer(prompt, gen))


def num_calls(backend: ScriptedBackend) -> dict[str | None, int]:
    """Calls of the model, by the variable that they set."""
    return collections.Counter(call.what.name for call in backend.calls if call.kind in ("generate", "select"))


def flat(lists):
    """One level less of lists in lists."""
    return list(itertools.chain.from_iterable(lists))


def args_of(backend: ScriptedBackend) -> list[SamplingArgs]:
    """The arguments of all gens, in the order of the calls."""
    return [call.what.args for call in backend.calls if isinstance(call.what, Gen)]


def test_the_programs_know_nothing_but_what_was_published():
    tree = ast.parse(inspect.getsource(ported))
    nodes = list(ast.walk(tree))
    imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports == ["import jsg as sgl", "from jsg.lang.words.ir import REGEX_FLOAT, REGEX_INT, REGEX_STR"]
    of_sgl = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sgl"]
    assert {node.attr for node in of_sgl} <= PUBLISHED
    gens = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "sgl.gen"]
    assert len(gens) > 20 and {keyword.arg for call in gens for keyword in call.keywords} <= GEN_ARGUMENTS


class TestOneCall:
    def test_mmlu(self, capsys):
        arguments = [{"examples": "Q: 1?\nA: B\n\n", "question": f"Q: {i}?\nA:"} for i in range(3)]
        backend = ScriptedBackend(lambda prompt, gen: " ABC"[int(prompt[-5]) + 1])
        states = ported.few_shot_mmlu.run_batch(
            arguments, temperature=0, max_new_tokens=1, backend=backend, num_threads=2, progress_bar=True
        )
        assert [state["answer"].strip()[0] for state in states] == ["A", "B", "C"]
        assert sorted(backend.prompts()) == [f"Q: 1?\nA: B\n\nQ: {i}?\nA:" for i in range(3)]
        assert {(args.max_tokens, args.temperature) for args in args_of(backend)} == {(1, 0)}
        assert "3/3" in capsys.readouterr().err

    def test_hellaswag(self):
        choices = [[f" end {i}", f" end {i + 1}"] for i in range(4)]
        arguments = [{"examples": "E. ", "question": f"Q{i}", "choices": choices[i]} for i in range(4)]
        backend = ScriptedBackend(choose=lambda prompt, select: select.choices[int(prompt[-1]) % 2])
        states = ported.few_shot_hellaswag.run_batch(arguments, temperature=0, backend=backend, num_threads=4)
        assert [choices[i].index(states[i]["answer"]) for i in range(4)] == [0, 1, 0, 1]
        assert num_calls(backend) == {"answer": 4}
        assert states[1].text() == "E. Q1 end 2"

    def test_gsm8k(self):
        backend = named()
        (state,) = ported.few_shot_gsm8k.run_batch(
            [("E. ", "Question: 1 + 1?\nAnswer:")], temperature=0, backend=backend
        )
        assert state["answer"] == "<answer>"
        (args,) = args_of(backend)
        assert (args.max_tokens, args.stop) == (512, ("Question", "Assistant:", "<|separator|>"))


def test_react():
    triplets = [{"thought": f" t{i}", "action": f" a{i}", "observation": f" o{i}"} for i in (1, 2)]
    backend = ScriptedBackend(lambda prompt, gen: " thought " + str(prompt.count("Thought")))
    state = ported.webthink.run(question="Who?", triplets=triplets, backend=backend, temperature=0)
    begin = "Answer by thoughts, actions and observations.\nWho?\nThought 1:"
    first = begin + " t1\nAction 1: a1\nObservation 1: o1\nThought 2:"
    second = first + " t2\nAction 2: a2\nObservation 2: o2\nThought 3:"
    assert state.text() == second, "what a branch wrote stays in it"
    assert state["thought_action"] == [" thought 3"]
    state.sync()  # the text does not wait for what the branches wrote
    assert sorted(backend.prompts()) == sorted([begin, first, second])
    assert [(args.max_tokens, args.stop) for args in args_of(backend)] == [(200, ("Observation",))] * 3


def test_generative_agents():
    ana = {"persona_name": "Ana"}
    calls = [
        (ported.poignancy_event, {**ana, "persona_iss": "Ana paints.", "event": "A rainy day"}),
        (ported.generate_event_triple, {**ana, "action": "reading"}),
        (ported.generate_pronunciatio, {"action": "reading"}),
        (ported.action_location_sector, {**ana, "sectors": "home, shop", "current_action": "buy milk"}),
        (ported.action_location_object, {**ana, "objects": "bed, lamp", "current_action": "sleep"}),
    ]
    backend = named()
    states = []
    for function, arguments in calls * 2:
        state = function.run(**arguments, temperature=0, backend=backend)
        state.sync()
        states.append(state)
    names = ("Rate", "Triple", "Emoji", "Location", "Object")
    assert [state[name] for state, name in zip(states, names * 2, strict=True)] == [f"<{name}>" for name in names] * 2
    assert [args.max_tokens for args in args_of(backend)] == [2, 20, 6, 10, 5] * 2
    assert backend.prompts()[3].endswith("buy milk, Ana goes to: {"), "one after another"


class TestTreeOfThought:
    def test_deep(self):
        backend = numbered()
        (state,) = ported.tree_search_deep.run_batch(
            [{"question": "Why?", "num_branches": 2}], temperature=0.001, backend=backend, num_threads=1
        )
        assert [len(forks) for forks in state.ret_value] == [2] * 8
        paths = [tuple(re.findall(r"\[assistant\](\d+)\[/assistant\]", text)) for text in flat(state.ret_value)]
        assert [len({path[:depth] for path in paths}) for depth in (1, 2, 3, 4)] == [2, 4, 8, 16]
        assert num_calls(backend) == dict(zip(DEEP, (2, 4, 8, 16), strict=True))
        assert {(args.max_tokens, args.temperature) for args in args_of(backend)} == {(256, 0.001)}
        backend.wait_closed()

    def test_v0(self):
        backend = numbered()
        states = ported.tree_search_v0.run_batch([("Why?", 3)], temperature=0.3, backend=backend, num_threads=1)
        plans, answers, scores = (states[0][name] for name in DEEP[:3])
        assert (len(plans), [len(of_plan) for of_plan in answers]) == (3, [3] * 3)
        assert [len(of_answer) for of_plan in scores for of_answer in of_plan] == [3] * 9
        texts = [*plans, *flat(answers), *flat(flat(scores))]
        assert sorted(map(int, texts)) == list(range(1, 40)), "39 calls, and no value of theirs was lost"
        assert num_calls(backend) == {"plan": 3, "answer": 9, "score": 27}
        assert states[0].text().startswith("[user]Write a plan") and states[0].text().endswith("Why?[/user]")
        backend.wait_closed()


class TestMerged:
    def test_llm_judge(self):
        backend = ScriptedBackend(lambda prompt, gen: " 7" if gen.name == "score" else f" good {len(prompt)}. ")
        state = ported.multi_dimension_judge.run(article="An article.", temperature=0, backend=backend)
        article = "You judge articles.\n\n```\nAn article.\n```\n\n"
        branches = [f"{article}USER: Judge it by this.\n{one} End with END.\nASSISTANT:" for one in ported.DIMENSIONS]
        names = [one.split(":")[0] for one in ported.DIMENSIONS]
        merged = "".join(f"{name}: good {len(branch)}.\n" for name, branch in zip(names, branches, strict=True))
        last = f"{article}What was said:\n{merged}All in all, from 1 to 10, I give it a"
        assert (state["score"], state.text()) == (" 7", last + " 7")
        assert num_calls(backend) == {"judgment": 6, "score": 1}
        assert sorted(backend.prompts()[:6]) == sorted(branches) and backend.prompts()[6:] == [last]

    def test_multi_chain_reasoning(self):
        backend = ScriptedBackend(lambda prompt, gen: prompt[-6:] if gen.name == "chain" else " 4")
        (state,) = ported.multi_chain_gsm8k.run_batch([{"question": "2 + 2?"}], temperature=0, backend=backend)
        chains = "".join(f"{i + 1}.{way}{way[-6:].strip()}\n" for i, way in enumerate(ported.WAYS))
        assert state.text() == f"Question: 2 + 2?\nSeveral answers:\n{chains}So the answer is 4"
        assert num_calls(backend) == {"chain": 5, "answer": 1}
        chain, answer = args_of(backend)[0], args_of(backend)[-1]
        assert (chain.temperature, chain.stop, answer.temperature, answer.max_tokens) == (0.3, ("Question",), 0, 16)

    def test_a_sample_of_several(self):
        backend = ScriptedBackend(lambda prompt, gen: " We add.", lambda prompt, select: "calculator")
        state = ported.parallel_sample.run(question="Compute 5 + 2 + 4.", n=5, temperature=1.0, backend=backend)
        assert [{name: state[name][i] for name in ("reasoning", "tool")} for i in range(5)] == [
            {"reasoning": " We add.", "tool": "calculator"}
        ] * 5
        assert num_calls(backend) == {"reasoning": 5, "tool": 5}


def test_tip_suggestion():
    gate = Gate()

    async def answer(prompt: str, gen: Gen) -> str:
        if gen.name != "paragraph":
            return f" {gen.name}"
        if sum(call.what.name == "paragraph" for call in backend.calls) == ported.NUM_TIPS:
            gate.open()
        await asyncio.wait_for(gate.passed(), 30)  # all five are asked for before one is answered
        return " Paragraph on" + re.findall(r"\nTip:(.*)\nParagraph:$", prompt)[0]

    backend = ScriptedBackend(answer)
    (state,) = ported.suggest_tips.run_batch([{"topic": "focus"}], temperature=0, backend=backend, num_threads=1)
    begin = "You give short tips.\nUSER: Some tips on focus.\nASSISTANT: Here are five:\n"
    tips = "".join(f"{i}. tip_{i}.\n" for i in range(1, 6))
    written = "".join(f"Tip {i}: Paragraph on  tip_{i}\n" for i in range(1, 6))
    assert state.text() == begin + tips + written
    assert num_calls(backend) == {f"tip_{i}": 1 for i in range(1, 6)} | {"paragraph": 5}


class TestForms:
    def test_json_jump_forward(self):
        said = '{\n    "name": "R",\n    "house": "Gryffindor",\n    "alive": "Alive",\n'
        said += '    "wand": {\n        "wood": "Willow",\n        "length": 14.0\n    }\n}'
        backend = ScriptedBackend(said)
        states = ported.character_gen.run_batch([{"name": name} for name in ("Ron", "Luna")], backend=backend)
        assert [state["json_output"] for state in states] == [said] * 2
        assert {(args.max_tokens, args.regex) for args in args_of(backend)} == {(256, ported.CHARACTER_REGEX)}

    def test_json_decode_regex(self):
        said = {"name": '"Oslo"', "population": "717710", "area": "480", "latitude": "59.9", "country": '"Norway"'}
        backend = ScriptedBackend(lambda prompt, gen: said[gen.name or ""])
        (state,) = ported.json_decode.run_batch([("Oslo is ...",)], temperature=0, backend=backend)
        assert json.loads(state["json_output"]) == {name: json.loads(value) for name, value in said.items()}
        assert [args.max_tokens for args in args_of(backend)] == [8, 8, 8, 8, 24]

    def test_long_json_decode(self):
        backend = named()
        state = ported.long_json_decode.run("A long page.", temperature=0, backend=backend)
        assert json.loads(state.text().partition("Page end.\n")[2]) == {
            name: f"<{name}>" for name in ("name", "capital", "language", "currency")
        }
        assert [args.stop for args in args_of(backend)] == [('"',)] * 4


class TestSideBySide:
    def test_line_retrieval(self):
        bodies = {f"body_{i}": f"line {i}: {i}{i}" for i in range(4)}
        backend = ScriptedBackend(" 22")
        (state,) = ported.line_retrieval.run_batch(
            [{"prefix": "Lines:", "suffix": "Line 2 is", **bodies}], temperature=0, backend=backend
        )
        lines = [f"{body}\n" for body in bodies.values()]
        assert state["answer"] == " 22" and state.text() == "Lines:\n" + "".join(lines) + "\nLine 2 is 22"
        assert [call.what for call in backend.calls if call.kind == "fork"] == [(4, (0, 1000, 2000, 3000))]
        assert [call.what for call in backend.calls if call.kind == "join"] == [tuple(lines)]

    def test_multi_document_qa(self):
        backend = ScriptedBackend("Oslo")
        docs = [f" Fact {i}." for i in range(10)]
        state = ported.multi_document_qa.run(docs, "Where?", temperature=0, backend=backend)
        assert state["answer"] == "Oslo"
        assert state.messages()[0]["content"] == "Remember this:" + "".join(docs) + " Where?"
        assert [call.kind for call in backend.calls] == ["fork", "join", "generate"]


class TestConversations:
    def test_multi_turn_chat(self):
        qas = [{"prompt": f"p{i} ", "new_tokens": 4 + i} for i in range(4)]
        backend = ScriptedBackend(lambda prompt, gen: f"a{prompt.count('p') - 1} ")
        (state,) = ported.multi_turns.run_batch([{"qas": qas}], temperature=0, backend=backend, num_threads=1)
        assert state.text() == "p0 a0 p1 a1 p2 a2 p3 a3 "
        assert [(args.max_tokens, args.ignore_eos) for args in args_of(backend)] == [(4 + i, True) for i in range(4)]

    def test_turns_that_are_streamed(self):
        backend = ScriptedBackend(lambda prompt, gen: [f"{gen.name} ", "it is."])
        state = ported.multi_turn_question.run(
            question_1="Why?", question_2="And?", temperature=0.7, stream=True, backend=backend
        )
        assert "".join(state.text_iter()) == state.text()
        roles = [(message["role"], message["content"]) for message in state.messages()]
        assert roles[1:] == [
            ("user", "Why?"),
            ("assistant", "answer_1 it is."),
            ("user", "And?"),
            ("assistant", "answer_2 it is."),
        ]

        async def pieces() -> list[str]:
            again = ported.multi_turn_question.run("Why?", "And?", stream=True, backend=backend)
            return [piece async for piece in again.text_async_iter(var_name="answer_2")]

        assert asyncio.run(pieces()) == ["answer_2 ", "it is."]

    def test_a_tool_is_chosen(self):
        for tool, name in (("calculator", "expression"), ("search engine", "word")):
            backend = ScriptedBackend(" x", lambda prompt, select, tool=tool: tool)
            state = ported.tool_use.run("What is 1 + 1?", backend=backend)
            assert (state["tool"], state[name], name in state) == (tool, " x", True)
            assert num_calls(backend) == {"tool": 1, name: 1}


def test_llava_bench(tmp_path):
    path = tmp_path / "picture.dat"
    path.write_bytes(PNG)
    arguments = [{"image_file": str(path), "question": f"What is {i}?"} for i in range(3)]
    backend = named()
    states = ported.image_qa.run_batch(arguments, temperature=0, num_threads=3, backend=backend)
    for i, state in enumerate(states):
        assert state.text() == f"[user]<image 9>What is {i}?[/user][assistant]<answer>[/assistant]"
    assert {args.max_tokens for args in args_of(backend)} == {768}


@pytest.mark.parametrize(
    ("program", "arguments", "constants"),
    [
        (ported.suggest_tips, {"topic": "focus"}, {}),
        (ported.few_shot_mmlu, {"examples": "E. ", "question": "Q?"}, {}),
        (ported.few_shot_hellaswag, {"examples": "E. ", "question": "Q?"}, {"choices": [" a", " b"]}),
        (ported.parallel_sample, {"question": "Q?"}, {"n": 3}),
        (ported.json_decode, {"document": "A page."}, {}),
        (ported.line_retrieval, {name: name for name in ("prefix", "suffix", *(f"body_{i}" for i in range(4)))}, {}),
        (ported.multi_document_qa, {"question": "Q?"}, {"docs": ["one", "two"]}),
        (ported.multi_turn_question, {"question_1": "Why?", "question_2": "And?"}, {}),
        (ported.tree_search_v0, {"question": "Why?"}, {"num_branches": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_those_that_look_at_no_value_can_be_compiled(program, arguments, constants):
    state = program.compile(**constants).run(**arguments, backend=backend_of_forms(), temperature=0)
    interpreted = program.run(**arguments, **constants, backend=backend_of_forms(), temperature=0)
    assert state.error() is None and interpreted.error() is None
    assert state.text() == interpreted.text()
    for name in ("answer", "answer_2", "json_output", "plan", "reasoning", "score", "tip_5", "tool"):
        assert (name in state) == (name in interpreted)
        assert name not in state or state[name] == interpreted[name]
