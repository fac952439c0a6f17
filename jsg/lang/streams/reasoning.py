"""Separates the reasoning of a model from its answer while it writes."""

import dataclasses

from jsg.errors import RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Markers:
    """The marks of the reasoning of a kind of model.

    Attributes:
        begin: The text that opens the reasoning.
        end: The text that closes it.
        starts_inside: Whether the chat template opens it, so that the answer begins with reasoning.
    """

    begin: str
    end: str
    starts_inside: bool


MARKERS = {
    "deepseek-r1": Markers("<think>", "</think>", True),
    "deepseek-v3": Markers("<think>", "</think>", False),
    "glm45": Markers("<think>", "</think>", False),
    "kimi": Markers("◁think▷", "◁/think▷", False),
    "qwen3": Markers("<think>", "</think>", False),
    "qwen3-thinking": Markers("<think>", "</think>", True),
    "step3": Markers("<think>", "</think>", True),
}
"""The markers by the `model_type` of `separate_reasoning`."""


def markers_of(model_type: str) -> Markers:
    """Gives the markers of a kind of model. Raises RequestError for an unknown one."""
    if model_type not in MARKERS:
        raise RequestError(
            f"model_type must be one of {', '.join(sorted(MARKERS))}, but got {model_type!r}", param="model_type"
        )
    return MARKERS[model_type]


class ReasoningSplitter:
    """Splits one answer, piece by piece.

    White space around the reasoning, and between it and the answer, belongs to neither.
    """

    def __init__(self, markers: Markers):
        self._markers = markers
        self._is_inside = markers.starts_inside
        self._may_open = True  # only white space so far
        self._is_at_start = markers.starts_inside  # white space here is dropped
        self._held = ""  # text that may be part of a marker, or white space at the reasoning's end

    def feed(self, text: str) -> tuple[str, str]:
        """Takes text; gives the new reasoning and the new answer that are certain now."""
        self._held += text
        reasoning = ""
        if self._may_open:
            bare = self._held.lstrip()
            if bare.startswith(self._markers.begin):
                self._held = bare[len(self._markers.begin) :]
                self._is_inside, self._is_at_start = True, True
            elif self._markers.begin.startswith(bare):
                return "", ""
            self._may_open = False
        if self._is_inside:
            reasoning = self._inside()
        return reasoning, "" if self._is_inside else self._outside()

    def finish(self) -> tuple[str, str]:
        """Gives the reasoning and the answer that were held back, at the end."""
        held, self._held = self._held, ""
        if self._is_inside:
            return (held.strip() if self._is_at_start else held.rstrip()), ""
        return "", held.lstrip() if self._is_at_start else held

    def _inside(self) -> str:
        end = self._markers.end
        at = self._held.find(end)
        if at >= 0:
            new, self._held = self._held[:at].rstrip(), self._held[at + len(end) :]
            new = new.lstrip() if self._is_at_start else new
            self._is_inside, self._is_at_start = False, True
            return new
        kept = max((n for n in range(1, len(end)) if self._held.endswith(end[:n])), default=0)
        sure = self._held[: len(self._held) - kept].rstrip()
        if self._is_at_start:
            new = sure.lstrip()
            if not new:
                return ""
            self._is_at_start = False
        else:
            new = sure
        self._held = self._held[len(sure) :]
        return new

    def _outside(self) -> str:
        new, self._held = self._held, ""
        if self._is_at_start:
            new = new.lstrip()
            self._is_at_start = not new
        return new
