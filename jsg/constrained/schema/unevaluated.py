"""Reads `unevaluatedProperties` and `unevaluatedItems`. They are refused where the value decides what is evaluated."""

from jsg.constrained.schema.alternatives import Alternative, Facet, Members
from jsg.constrained.schema.containers import Context
from jsg.constrained.schema.keywords import Reader
from jsg.constrained.schema.shapes import ANY, Array, Json

_DEPENDS = ("anyOf", "dependencies", "dependentSchemas", "if", "oneOf")


def alternative(context: Context, location: int, keyword: str) -> Alternative:
    """The alternative of what the keyword says. It has a refusal where the value decides what is evaluated."""
    kind = "properties" if keyword == "unevaluatedProperties" else "items"
    node = context.child(location, keyword)
    shape = Members() if kind == "properties" else Array()
    if node == ANY:
        return Alternative(Members((Facet({}, others="given"),)) if kind == "properties" else shape)
    found = _Evaluated()
    blocker = _collect(context, location, kind, found, is_top=True)
    if found.is_all:
        return Alternative(shape)
    if blocker is not None:
        refusal = (
            f"{keyword} at {context.pointer(location)} is not supported beside {blocker}, because it then depends on "
            "the value what has been evaluated; remove one of the two"
        )
        return Alternative(shape, refusals=(refusal,))
    if kind == "properties":
        patterns = tuple((pattern, ANY) for pattern in found.patterns)
        return Alternative(Members((Facet(dict.fromkeys(found.names, ANY), patterns, node, "given"),)))
    return Alternative(Array(prefix=(ANY,) * found.length, items=node))


class _Evaluated:
    """The names, patterns and number of first items that are evaluated for every value."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.length = 0
        self.is_all = False


def _collect(context: Context, location: int, kind: str, found: _Evaluated, is_top: bool) -> str | None:
    """Adds to `found` what a schema evaluates. Returns the keyword that makes this depend on the value, or None."""
    stack = [(location, is_top)]
    seen: set[int] = set()
    blocker: str | None = None
    while stack:
        current, is_first = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        keywords = context.nodes.keywords(current)
        reader = Reader(context.locations.all[current], keywords)
        _add_own(reader, kind, found)
        if not is_first and ("unevaluatedProperties" if kind == "properties" else "unevaluatedItems") in keywords:
            found.is_all = True
        depends = [keyword for keyword in _DEPENDS if _applies(keyword, keywords)]
        if kind == "items" and "contains" in keywords:
            depends.append("contains")
        if depends:
            blocker = blocker or f"{depends[0]} at {context.pointer(current)}"
        stack.extend((child, False) for child in context.always(current, reader))
    return blocker


def _add_own(reader: Reader, kind: str, found: _Evaluated) -> None:
    keywords = reader.keywords
    if kind == "properties":
        found.names.update(dict.fromkeys(reader.mapping("properties")))
        found.patterns.update(dict.fromkeys(reader.mapping("patternProperties")))
        found.is_all = found.is_all or "additionalProperties" in keywords
        return
    items = keywords.get("items")
    prefix = items if isinstance(items, list) else reader.array("prefixItems")
    found.length = max(found.length, len(prefix))
    rest = "additionalItems" if isinstance(items, list) else "items"
    found.is_all = found.is_all or rest in keywords


def _applies(keyword: str, keywords: dict[str, Json]) -> bool:
    value = keywords.get(keyword)
    if keyword == "dependencies" and isinstance(value, dict):
        return any(not isinstance(needed, list) for needed in value.values())
    return keyword in keywords
