"""Answers that keep to a form: an object in one regular expression, several small ones, and facts of a long page."""

from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Need, Workload

NAME = r"[A-Za-z][A-Za-z ]{1,15}"
CHARACTER = (
    r"\{\n"
    rf'    "name": "{NAME}",\n'
    r'    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "wand": \{\n'
    rf'        "wood": "{NAME}",\n'
    rf'        "core": "{NAME}",\n'
    r'        "length": [0-9]{1,2}\.[0-9]\n'
    r"    \},\n"
    r'    "alive": "(Alive|Deceased)",\n'
    rf'    "patronus": "{NAME}",\n'
    rf'    "bogart": "{NAME}"\n'
    r"\}"
)
WORD = r'"[A-Za-z][A-Za-z ]{0,10}"'
FACTS = {"name": (WORD, 8), "population": (r"[0-9]{1,7}", 8), "area": (r"[0-9]{1,5}", 8)} | {
    "latitude": (r"-?[0-9]{1,2}\.[0-9]{1,3}", 8),
    "country": (WORD, 24),
}
"""For each fact of a city its form, and the most tokens of it."""
LONG_FACTS = {"name": 8, "capital": 8, "language": 8, "currency": 24}


@sgl.function
def character(s, intro, num_tokens):
    s += intro + sgl.gen("object", max_tokens=num_tokens, temperature=0, regex=CHARACTER)


@sgl.function
def city(s, page):
    s += page + "{"
    with s.var_scope("object"):
        comma = ""
        for name, (form, num_tokens) in FACTS.items():
            s += f'{comma}\n  "{name}": ' + sgl.gen(name, max_tokens=num_tokens, temperature=0, regex=form)
            comma = ","
        s += "\n}"


@sgl.function
def country(s, page):
    """No form, but a length: each fact is read out of a document that takes most of the work."""
    s += page + "{"
    comma = ""
    for name, num_tokens in LONG_FACTS.items():
        s += f'{comma}\n  "{name}": "' + sgl.gen(name, max_tokens=num_tokens, temperature=0, ignore_eos=True) + '"'
        comma = ","
    s += "\n}"


def character_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Short prompts."""
    intro = texts.text(40)
    return [
        {"intro": f"{intro}\nCharacter {index}, {texts.text(3)}, as JSON:\n", "num_tokens": 256}
        for index in range(count)
    ]


def city_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Pages of a city of several hundred tokens."""
    return [
        {"page": f"Page {index}.\n{texts.text(texts.length(800, 400, 1500))}\nIts facts, as JSON:\n"}
        for index in range(count)
    ]


def country_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Pages of more than ten thousand tokens."""
    return [
        {"page": f"Page {index}.\n{texts.text(texts.between(10_000, 12_000))}\nIts facts, as JSON:\n"}
        for index in range(count)
    ]


FORMS = frozenset[Need]({"forms"})
WORKLOADS = (
    Workload(name="json", title="JSON by one form", program=character, arguments=character_runs, count=50, needs=FORMS),
    Workload(name="json-parts", title="JSON by small forms", program=city, arguments=city_runs, count=20, needs=FORMS),
    Workload(name="json-long", title="facts of a long page", program=country, arguments=country_runs, count=10),
)
