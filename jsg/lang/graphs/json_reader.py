"""Reads the JSON of `json_form` strictly: a field that is unknown, of a wrong type or out of range is an error."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Never

from jsg.errors import GraphError, RequestError
from jsg.lang.graphs.graph import (
    AllOf,
    AnyNode,
    AnyOf,
    Append,
    Argument,
    ArgumentRef,
    Assign,
    Block,
    Choose,
    Cond,
    Condition,
    ConstantValue,
    Contains,
    DictValue,
    Equals,
    Fork,
    Generate,
    Graph,
    Join,
    ListValue,
    Loop,
    Matches,
    Media,
    Not,
    Open,
    Piece,
    ReadText,
    Scope,
    StateValue,
    TextValue,
    Turn,
    Value,
    ValueRef,
    VariableValue,
)
from jsg.lang.ir import GEN, ROLES, Gen, Image, SamplingArgs, Video
from jsg.parameters import Flag, Integer, Number, OneOf, Texts, TokenIds
from jsg.processing.media.base64_files import read_base64

VERSION = 1
MAX_DEPTH = 32  # of blocks in blocks, values in values and conditions in conditions
_MAX_ABS = 2**53  # whole numbers that JSON carries exactly everywhere


class Reader:
    """Reads JSON values; `where` names what is read, in messages.

    Each method gives what stands in the value, or raises GraphError.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._depth = 0

    def fail(self, rule: str) -> Never:
        """Refuses what is read."""
        raise GraphError(f"{self._where}: {rule}", param="graph")

    def graph(self, source: Any) -> Graph:
        """A graph; whether it is well-formed, `check_graph` says."""
        version = source.get("jsg_graph") if isinstance(source, Mapping) else None
        if version != VERSION:
            self.fail(f"it must be an object with jsg_graph {VERSION}, the version of graphs that is understood here")
        self._object(source, ("jsg_graph", "name", "arguments", "nodes", "outputs", "returns"))
        return Graph(
            name=self.text(source["name"], "name"),
            arguments=tuple(self._argument(argument) for argument in self._array(source["arguments"], "arguments")),
            block=Block(self._nodes(source["nodes"]), self._values(source["outputs"], "outputs")),
            returns=self._value(source["returns"]),
        )

    def _argument(self, source: Any) -> Argument:
        self._object(source, ("name", "kind"))
        kind = self._one_of(source["kind"], "kind", ("text", "image", "video"))
        return Argument(self.text(source["name"], "name"), kind)

    def _nodes(self, source: Any) -> tuple[AnyNode, ...]:
        return tuple(self._node(node) for node in self._array(source, "nodes"))

    def _node(self, source: Any) -> AnyNode:
        outer = self._where
        if not isinstance(source, Mapping):
            self.fail("a node must be an object")
        kind, number = source.get("kind"), source.get("id")
        self._where = f"node {number if isinstance(number, int) else '?'}"
        if not isinstance(kind, str) or kind not in _NODES:
            self.fail(f"kind must be one of {', '.join(_NODES)}")
        required, optional, read = _NODES[kind]
        self._object(source, ("kind", "id", "stream", "line", *required), optional)
        common = {
            "id": self._integer(number, "id"),
            "stream": self._integer(source["stream"], "stream"),
            "line": self.text(source["line"], "line"),
        }
        self._where = f"node {number} ({kind}, {common['line']})"
        node = read(self, common, source)
        self._where = outer
        return node

    def open(self, common: dict[str, Any], source: Mapping[str, Any]) -> Open:
        """A node of kind open."""
        defaults, spec = source.get("defaults"), source.get("num_api_spec_tokens")
        return Open(
            **common,
            program=self.text(source["program"], "program"),
            defaults=None if defaults is None else self.sampling(defaults),
            num_api_spec_tokens=None if spec is None else self._integer(spec, "num_api_spec_tokens"),
        )

    def append(self, common: dict[str, Any], source: Mapping[str, Any]) -> Append:
        """A node of kind append."""
        return Append(**common, pieces=self._pieces(source["pieces"]), part=self._part(source))

    def media_node(self, common: dict[str, Any], source: Mapping[str, Any]) -> Media:
        """A node of kind media."""
        what, frames = source["source"], source.get("num_frames")
        if isinstance(what, Mapping) and "argument" in what:
            self._object(what, ("argument",))
            read: ArgumentRef | Image | Video = ArgumentRef(self.text(what["argument"], "argument"))
        else:
            read = self.media(what)
        num_frames = None if frames is None else self._integer(frames, "num_frames")
        return Media(**common, source=read, num_frames=num_frames, part=self._part(source))

    def generate(self, common: dict[str, Any], source: Mapping[str, Any]) -> Generate:
        """A node of kind generate."""
        gen = Gen(self._optional_text(source, "name"), self.sampling(source.get("args", {})))
        return Generate(**common, gen=gen, reasoning=self._optional_text(source, "reasoning"))

    def choose(self, common: dict[str, Any], source: Mapping[str, Any]) -> Choose:
        """A node of kind choose."""
        temperature, seed = source.get("temperature", 0.0), source.get("seed")
        choices = [TextValue(self._pieces(choice)) for choice in self._array(source["choices"], "choices")]
        return Choose(
            **common,
            name=self._optional_text(source, "name"),
            choices=tuple(choices),
            method=self.text(source["method"], "method"),
            temperature=self._number(temperature, "temperature"),
            seed=None if seed is None else self._integer(seed, "seed"),
        )

    def turn(self, common: dict[str, Any], source: Mapping[str, Any]) -> Turn:
        """A node of kind turn."""
        role = self._one_of(source["role"], "role", ROLES)
        return Turn(**common, role=role, is_begin=self._flag(source["is_begin"], "is_begin"))

    def scope(self, common: dict[str, Any], source: Mapping[str, Any]) -> Scope:
        """A node of kind scope."""
        is_begin = self._flag(source["is_begin"], "is_begin")
        return Scope(**common, name=self.text(source["name"], "name"), is_begin=is_begin)

    def read_text(self, common: dict[str, Any], source: Mapping[str, Any]) -> ReadText:
        """A node of kind readtext."""
        return ReadText(**common)

    def assign(self, common: dict[str, Any], source: Mapping[str, Any]) -> Assign:
        """A node of kind assign."""
        return Assign(**common, name=self.text(source["name"], "name"), value=self._value(source["value"]))

    def fork(self, common: dict[str, Any], source: Mapping[str, Any]) -> Fork:
        """A node of kind fork."""
        offsets = source.get("offsets")
        return Fork(
            **common,
            branches=self._integers(source["branches"], "branches"),
            offsets=None if offsets is None else self._integers(offsets, "offsets"),
        )

    def join(self, common: dict[str, Any], source: Mapping[str, Any]) -> Join:
        """A node of kind join."""
        mode = self._one_of(source["mode"], "mode", ("gather_variable", "concate_and_append"))
        return Join(**common, branches=self._integers(source["branches"], "branches"), mode=mode)

    def cond(self, common: dict[str, Any], source: Mapping[str, Any]) -> Cond:
        """A node of kind cond."""
        before = self._values(source.get("before", {}), "before")
        condition = self._condition(source["condition"])
        then, otherwise = self._block(source["then"]), self._block(source["otherwise"])
        return Cond(**common, condition=condition, then=then, otherwise=otherwise, before=before)

    def loop(self, common: dict[str, Any], source: Mapping[str, Any]) -> Loop:
        """A node of kind loop."""
        until = source.get("until")
        return Loop(
            **common,
            body=self._block(source["body"]),
            until=None if until is None else self._condition(until),
            max_rounds=self._integer(source["max_rounds"], "max_rounds"),
            before=self._values(source.get("before", {}), "before"),
        )

    def media(self, source: Any) -> Image | Video:
        """A picture or a video."""
        is_video = isinstance(source, Mapping) and "video" in source
        kind = "video" if is_video else "image"
        self._object(source, (kind, "media_type", *(("num_frames",) if is_video else ())))
        try:
            data = read_base64(self.text(source[kind], kind), kind)
        except RequestError as error:
            self.fail(str(error))
        media_type = self.text(source["media_type"], "media_type")
        if is_video:
            return Video(data, self._integer(source["num_frames"], "num_frames"), media_type)
        assert isinstance(data, bytes), "only a video may be frames"
        return Image(data, media_type)

    def sampling(self, source: Any) -> SamplingArgs:
        """Sampling arguments."""
        if not isinstance(source, Mapping):
            self.fail("sampling arguments must be an object")
        return SamplingArgs(**{name: self._argument_of_gen(name, value) for name, value in source.items()})

    def _argument_of_gen(self, name: str, value: Any) -> Any:
        if name not in GEN:
            self.fail(f"there is no sampling argument {name!r}")
        match GEN[name].kind:
            case Integer():
                return self._integer(value, name, is_signed=True)
            case Number():
                return self._number(value, name)
            case Flag():
                return self._flag(value, name)
            case Texts():
                return tuple(self.text(item, name) for item in self._array(value, name))
            case TokenIds():
                return self._integers(value, name)
            case OneOf(values):
                return self._one_of(value, name, values)
            case _:
                return self.text(value, name)

    def _block(self, source: Any) -> Block:
        with self._deeper():
            self._object(source, ("nodes", "outputs"))
            return Block(self._nodes(source["nodes"]), self._values(source["outputs"], "outputs"))

    def _pieces(self, source: Any) -> tuple[Piece, ...]:
        return tuple(self._piece(piece) for piece in self._array(source, "text"))

    def _piece(self, source: Any) -> Piece:
        if isinstance(source, str):
            return self.text(source, "text")
        if isinstance(source, Mapping) and "argument" in source:
            self._object(source, ("argument",))
            return ArgumentRef(self.text(source["argument"], "argument"))
        self._object(source, ("node", "name"), ("index",))
        index = source.get("index")
        return ValueRef(
            self._integer(source["node"], "node"),
            self.text(source["name"], "name"),
            None if index is None else self._integer(index, "index"),
        )

    def _values(self, source: Any, what: str) -> tuple[tuple[str, Value], ...]:
        if not isinstance(source, Mapping):
            self.fail(f"{what} must be an object")
        return tuple((self.text(name, what), self._value(value)) for name, value in source.items())

    def _value(self, source: Any) -> Value:
        with self._deeper():
            if isinstance(source, Mapping) and "state" in source:
                self._object(source, ("state", "variables"))
                return StateValue(
                    self._integer(source["state"], "state"), self._values(source["variables"], "variables")
                )
            match self._tagged(source, ("text", "list", "dict", "constant", "variable")):
                case "text", pieces:
                    return TextValue(self._pieces(pieces))
                case "list", items:
                    return ListValue(tuple(self._value(item) for item in self._array(items, "list")))
                case "dict", items:
                    return DictValue(self._values(items, "dict"))
                case "variable", source_ref:
                    ref = self._piece(source_ref)
                    if not isinstance(ref, ValueRef):
                        self.fail("variable must be an object with node and name")
                    return VariableValue(ref)
                case _, constant:
                    if constant is None or isinstance(constant, bool):
                        return ConstantValue(constant)
                    is_whole = isinstance(constant, int)
                    number = self._number(constant, "constant")
                    return ConstantValue(constant if is_whole else number)

    def _condition(self, source: Any) -> Condition:
        with self._deeper():
            match self._tagged(source, ("equals", "contains", "matches", "not", "all", "any")):
                case "not", inner:
                    return Not(self._condition(inner))
                case ("all" | "any") as tag, inner:
                    conditions = tuple(self._condition(one) for one in self._array(inner, tag))
                    return AllOf(conditions) if tag == "all" else AnyOf(conditions)
                case tag, pair:
                    if len(self._array(pair, tag)) != 2:
                        self.fail(f"{tag} must be a list of two")
                    value = TextValue(self._pieces(pair[0]))
                    if tag == "matches":
                        return Matches(value, self.text(pair[1], "pattern"))
                    text = TextValue(self._pieces(pair[1]))
                    return Equals(value, text) if tag == "equals" else Contains(value, text)

    def _tagged(self, source: Any, tags: tuple[str, ...]) -> tuple[str, Any]:
        if not isinstance(source, Mapping) or len(source) != 1 or next(iter(source)) not in tags:
            self.fail(f"expected an object with one of the fields {', '.join(tags)}")
        return next(iter(source.items()))

    @contextlib.contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self.fail(f"blocks, values and conditions may be nested {MAX_DEPTH} deep at most")
        yield
        self._depth -= 1

    def _object(self, source: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
        if not isinstance(source, Mapping):
            self.fail(f"expected an object with the fields {', '.join(required)}")
        missing = [name for name in required if name not in source]
        unknown = [str(name) for name in source if name not in required and name not in optional]
        if missing or unknown:
            rule = [f"the field {name!r} is missing" for name in missing[:1]]
            self.fail(" and ".join(rule + [f"there is no field {name[:40]!r}" for name in unknown[:1]]))

    def _part(self, source: Mapping[str, Any]) -> tuple[int, int] | None:
        if (part := source.get("part")) is None:
            return None
        numbers = self._integers(part, "part")
        if len(numbers) != 2:
            self.fail("part must be a list of two numbers")
        return numbers[0], numbers[1]

    def _array(self, source: Any, what: str) -> list[Any]:
        if not isinstance(source, list):
            self.fail(f"{what} must be a list")
        return source

    def text(self, source: Any, what: str) -> str:
        """Valid Unicode."""
        if not isinstance(source, str):
            self.fail(f"{what} must be text")
        try:
            source.encode()
        except UnicodeEncodeError:
            self.fail(f"{what} must be valid Unicode, but has a lone surrogate")
        return source

    def _optional_text(self, source: Mapping[str, Any], what: str) -> str | None:
        return None if source.get(what) is None else self.text(source[what], what)

    def _integer(self, source: Any, what: str, *, is_signed: bool = False) -> int:
        if not isinstance(source, int) or isinstance(source, bool):
            self.fail(f"{what} must be a whole number")
        if abs(source) > _MAX_ABS or (source < 0 and not is_signed):
            self.fail(f"{what} must be {'between -2^53 and' if is_signed else 'between 0 and'} 2^53")
        return source

    def _integers(self, source: Any, what: str) -> tuple[int, ...]:
        return tuple(self._integer(item, what) for item in self._array(source, what))

    def _number(self, source: Any, what: str) -> float:
        if not isinstance(source, int | float) or isinstance(source, bool):
            self.fail(f"{what} must be a number")
        if abs(source) > _MAX_ABS or not math.isfinite(source):
            self.fail(f"{what} must be a finite number, 2^53 at most")
        return float(source)

    def _flag(self, source: Any, what: str) -> bool:
        if not isinstance(source, bool):
            self.fail(f"{what} must be true or false")
        return source

    def _one_of(self, source: Any, what: str, values: tuple[str, ...]) -> Any:
        if not isinstance(source, str) or source not in values:
            self.fail(f"{what} must be one of {', '.join(values)}")
        return source


_NODES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., AnyNode]]] = {
    "open": (("program",), ("defaults", "num_api_spec_tokens"), Reader.open),
    "append": (("pieces",), ("part",), Reader.append),
    "media": (("source",), ("num_frames", "part"), Reader.media_node),
    "generate": ((), ("name", "args", "reasoning"), Reader.generate),
    "choose": (("choices", "method"), ("name", "temperature", "seed"), Reader.choose),
    "turn": (("role", "is_begin"), (), Reader.turn),
    "scope": (("name", "is_begin"), (), Reader.scope),
    "readtext": ((), (), Reader.read_text),
    "assign": (("name", "value"), (), Reader.assign),
    "fork": (("branches",), ("offsets",), Reader.fork),
    "join": (("branches", "mode"), (), Reader.join),
    "cond": (("condition", "then", "otherwise"), ("before",), Reader.cond),
    "loop": (("body", "max_rounds"), ("until", "before"), Reader.loop),
}
"""Required fields, optional fields, and what reads them, by kind."""
