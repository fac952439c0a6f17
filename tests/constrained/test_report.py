"""The report of `jsg grammar check`, beyond what `tests/test_grammar_command.py` reads on the terminal."""

import json

from jsg.constrained.report import check_grammar
from jsg.speech.dialects import DIALECTS
from jsg.speech.rules.call_grammar import Tool, tools_to_structural_tag
from jsg.types import GrammarSpec

COLOUR = {"type": "object", "properties": {"c": {"type": "string", "format": "colour"}}}


def test_what_is_an_annotation_in_a_structural_tag_is_named_with_its_place():
    content = {"type": "json_schema", "json_schema": COLOUR}
    tags = [{"type": "tag", "begin": f"<{name}>", "content": content, "end": ""} for name in "ab"]
    new = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}}
    old = {"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "<a>", "schema": COLOUR, "end": ""}]}
    for tag, place in ((new, "format.tags[0].content"), (old, "structures[0]")):
        report = check_grammar(GrammarSpec("structural_tag", json.dumps(tag)))
        # A schema that stands in several places is one grammar, and named once.
        assert report.annotations == (f"format 'colour' at #/properties/c/format in the structural tag.{place}",)
        assert f"ignored:  {report.annotations[0]}" in str(report)


def test_what_is_an_annotation_in_a_tool_is_named():
    tools = [Tool("paint", None, COLOUR), Tool("wait", None, {"properties": {"s": {"minimun": 1}}}), Tool("stop")]
    spec = tools_to_structural_tag(tools, "auto", DIALECTS["hermes"])
    formats, keywords = check_grammar(spec).annotations
    assert formats.startswith("format 'colour' at #/properties/c/format in the structural tag.format.tags[0]")
    assert keywords.startswith("minimun at #/properties/s/minimun in the structural tag.format.tags[1]")


def test_other_kinds_have_no_annotations():
    for spec in (GrammarSpec("regex", "a"), GrammarSpec("ebnf", 'root ::= "a"'), GrammarSpec("choices", '["a"]')):
        assert check_grammar(spec).annotations == ()
