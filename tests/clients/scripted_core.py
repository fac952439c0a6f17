"""An engine core whose model says what the prompt tells it to, so that a failure behind it is no fault of a model.

A line `SCRIPT first || second || ...` in a turn of the prompt says what the assistant's next turns are. `say TEXT` is a
text, and `call NAME {...}` is a call of a tool in Hermes's form; `&&` joins several calls. A prompt without a script is
answered with "ok". If the request has a grammar, the answer must match it, or the request fails.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers

from jsg.config import EngineConfig
from jsg.constrained.run.machine import Machine
from jsg.constrained.tables import StaticTables
from jsg.engine.child.protocol import Progress
from jsg.errors import RequestError
from jsg.types import FinishReason, FinishType, Request
from tests.engine.fake_core import FakeCore

CONTEXT_LENGTH = 65_536
END = 257  # <|im_end|>
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)


def answer_to(prompt: str) -> str:
    """What the model says next."""
    script, num_said = ["say ok"], 0
    for role, text in TURN.findall(prompt) or [("user", prompt)]:
        if role == "assistant":
            num_said += 1
        elif found := re.search(r"SCRIPT (.*)", text):
            script, num_said = found[1].split(" || "), 0
    is_open = prompt.rpartition("<|im_start|>")[2].startswith("assistant\n")  # the turn that the answer is
    line = script[min(num_said - is_open, len(script) - 1)]
    return "\n".join(map(spoken, line.split(" && ")))


def spoken(said: str) -> str:
    """A piece of a script as the model writes it."""
    kind, _, rest = said.strip().partition(" ")
    if kind != "call":
        return rest
    name, _, arguments = rest.partition(" ")
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': json.loads(arguments)})}\n</tool_call>"


class ScriptedCore(FakeCore):
    """Says what the script in the prompt says. The `tokenizer_path` is the directory of the byte tokenizer."""

    def __init__(self, config: EngineConfig, *, report: Callable[[Progress], None]) -> None:
        super().__init__(config, report=report)
        sizes = dict.fromkeys(("context_length", "max_request_tokens"), CONTEXT_LENGTH)
        self.info = dataclasses.replace(self.info, **sizes, max_total_tokens=16 * CONTEXT_LENGTH)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(config.tokenizer_path or "") / "tokenizer.json"))
        self._answers: dict[Sequence[int], list[int]] = {}

    def add(self, request: Request) -> None:
        """Takes a request whose answer matches its grammar."""
        text = answer_to(self._tokenizer.decode(request.input_ids, skip_special_tokens=False))
        self._check_grammar(request, text)
        self._answers[request.input_ids] = [*self._tokenizer.encode(text, add_special_tokens=False).ids, END]
        super().add(request)

    def _check_grammar(self, request: Request, text: str) -> None:
        tables = self.grammars.tables.get(str(request.sampling.grammar))
        if tables is not None:
            machine = Machine(StaticTables.from_bytes(tables))
            state = machine.advance(machine.start(), text.encode())
            if state is None or not machine.is_accepting(state):
                raise RequestError(f"the grammar of the request does not take the answer of its script: {text}")

    def token(self, request: Request, index: int) -> int:
        """The output token with this index."""
        return self._answers[request.input_ids][index]

    def finish(self, request: Request, num_output: int) -> FinishReason | None:
        """Why the answer ends after so many tokens; None where it goes on."""
        if num_output == len(self._answers[request.input_ids]):
            return FinishReason(FinishType.STOP, matched=END)
        return super().finish(request, num_output)
