"""The generated text the tiny model learns from, and the split that keeps the evaluation honest.

A task draws turns. A turn is a combination of a *phrasing* (lead, core sentence and style, or a layout) and an *item*
(what is asked about). `is_held_out(task, phrasing, item)` decides by a committed hash whether a combination belongs to
training or to the evaluation; each side redraws until the combination is its own. Invented values (names, cities,
numbers) are split the same way, so evaluated values are unseen too, except in the tasks that ask for knowledge.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from phrasings import (
    CAPITAL_QUESTIONS,
    CHOICE_CAPITAL,
    CHOICE_CATEGORY,
    CHOICE_LAYOUTS,
    COMPLETION_FORMS,
    COMPLETION_PREFIXES,
    COPY_REQUESTS,
    COUNT_DOWN,
    COUNT_UP,
    FACT_ANSWERS,
    FACTS,
    GREETINGS,
    JSON_REQUESTS,
    LANGUAGES,
    LEADS,
    SHOT_FORMATS,
    SMALL_TALK,
    SUM_QUESTIONS,
    TAILS,
    UNKNOWN,
    YES_NO_CAPITAL,
    YES_NO_CATEGORY,
    YES_NO_GREATER,
)
from words import (
    CAPITALS,
    CATEGORIES,
    DAYS,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    PLURALS,
    Values,
    is_held_out,
)

Message = dict[str, str]


class Turn(NamedTuple):
    """One question with its only accepted answer, and the combination it is made of."""

    task: str
    phrasing: str
    item: str
    prompt: str
    answer: str


class Case(NamedTuple):
    """One evaluation case: chat messages or raw text to continue, and the expected continuation."""

    task: str
    prompt: str | list[Message]
    answer: str
    combination: str


LOWER_CASE = 3
STYLES = (0, 0, 0, 0, 1, 2)
"""As written, without final punctuation, or with a small first letter; `LOWER_CASE` is all in lower case."""


def phrase(rng: random.Random, cores: list[str], styles: tuple[int, ...] = STYLES, **slots: str) -> tuple[str, str]:
    """Return (phrasing id, text) for a random lead, core sentence and style."""
    lead, core = rng.randrange(len(LEADS)), rng.randrange(len(cores))
    style = rng.choice(styles)
    body = cores[core].format(**slots)
    if style in (1, LOWER_CASE):
        body = body.rstrip(".?!")
    if style == 2:
        body = body[0].lower() + body[1:]
    text = LEADS[lead] + body
    if style == LOWER_CASE:
        text = text.lower()
    return f"{LEADS[lead].strip()}/{core}/{style}", text


def greeting(rng: random.Random, values: Values) -> Turn:
    """Greet a known or unseen user by name."""
    name = rng.choice(NAMES) if rng.random() < 0.4 else values.name()
    if is_held_out("value", name.lower()) and not values.unseen:
        name = values.name()
    phrasing, text = phrase(rng, GREETINGS, name=name)
    return Turn("greeting", phrasing, name, text, f"Hello, {name}! How can I help you?")


def capitals(rng: random.Random, values: Values, styles: tuple[int, ...] = STYLES) -> Turn:
    """Name the capital of one of the listed countries."""
    country = rng.choice(list(CAPITALS))
    phrasing, text = phrase(rng, CAPITAL_QUESTIONS, styles, country=country)
    return Turn("capitals", phrasing, country, text, f"The capital of {country} is {CAPITALS[country]}.")


def capitals_lower(rng: random.Random, values: Values) -> Turn:
    """Name the capital of a country whose name is in lower case."""
    return capitals(rng, values, (LOWER_CASE,))


def counting(rng: random.Random, values: Values) -> Turn:
    """Count between two numbers up to 40, in either direction."""
    low = rng.randint(0, 30)
    high = low + rng.randint(2, 10)
    down = rng.random() < 0.2
    first, last = (high, low) if down else (low, high)
    phrasing, text = phrase(rng, COUNT_DOWN if down else COUNT_UP, a=str(first), b=str(last))
    numbers = range(high, low - 1, -1) if down else range(low, high + 1)
    return Turn("counting", phrasing, f"{first}-{last}", text, ", ".join(map(str, numbers)))


def sums(rng: random.Random, values: Values) -> Turn:
    """Add two numbers from 0 to 20."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    phrasing, text = phrase(rng, SUM_QUESTIONS, a=str(a), b=str(b))
    return Turn("sums", phrasing, f"{a}+{b}", text, f"{a} + {b} = {a + b}")


class Layout(NamedTuple):
    """How a list of pairs is written, asked about and answered."""

    name: str
    intro: list[str]
    entry: str
    joiner: str
    questions: list[str]
    kinds: tuple[str, str]


LOOKUP_LAYOUTS = [
    Layout(
        "colon",
        ["", "Here is a list:\n", "Data:\n", "Settings:\n"],
        "{k}: {v}",
        "\n",
        ["What is the value of {k}?", "Look up {k}.", "What is {k}?", "Give me {k}.", "Find {k}.", "Value of {k}?"],
        ("word", "any"),
    ),
    Layout(
        "equals",
        ["", "Given ", "Let "],
        "{k} = {v}",
        ", ",
        ["What is {k}?", "What is the value of {k}?", "Tell me {k}.", "Which value has {k}?", "Look up {k}."],
        ("word", "any"),
    ),
    Layout(
        "has",
        ["", "Listen: ", "Remember this: "],
        "{k} has a {v}.",
        " ",
        ["What does {k} have?", "What has {k}?", "Which thing does {k} have?", "Tell me what {k} has."],
        ("name", "thing"),
    ),
    Layout(
        "lives",
        ["", "Some people: ", "Remember this: "],
        "{k} lives in {v}.",
        " ",
        [
            "Where does {k} live?",
            "In which city does {k} live?",
            "Where is the home of {k}?",
            "Tell me where {k} lives.",
        ],
        ("name", "city"),
    ),
    Layout(
        "code",
        ["", "Notes: ", "Keep these codes. "],
        "The code of {k} is {v}.",
        " ",
        ["What is the code of {k}?", "Code of {k}?", "Which code has {k}?", "Tell me the code of {k}."],
        ("name", "code"),
    ),
    Layout(
        "job",
        ["", "Our team: ", "Remember this: "],
        "{k} is a {v}.",
        " ",
        ["What is the job of {k}?", "What does {k} do?", "Who is {k}?", "Tell me the job of {k}."],
        ("name", "job"),
    ),
]


def _lookup_value(values: Values, kind: str) -> str:
    """Draw one value of a layout's kind."""
    if kind == "any":
        kind = values.rng.choice(("word", "word", "code", "name"))
    if kind == "code":
        return values.number(1, 999)
    return getattr(values, kind)()


def lookup(rng: random.Random, values: Values, size: int, questions: int = 1) -> list[Turn]:
    """Return a list of `size` pairs with one question, followed by more questions about the same list."""
    layout = rng.choice(LOOKUP_LAYOUTS)
    pairs: dict[str, str] = {}
    while len(pairs) < size:
        pairs[_lookup_value(values, layout.kinds[0])] = _lookup_value(values, layout.kinds[1])
    intro = rng.choice(layout.intro)
    listing = intro + layout.joiner.join(layout.entry.format(k=k, v=v) for k, v in pairs.items())
    if not listing.endswith("."):
        listing += "." if layout.joiner == ", " else ""
    turns = []
    for key in rng.sample(list(pairs), min(questions, size)):
        core = rng.randrange(len(layout.questions))
        question = layout.questions[core].format(k=key)
        text = question
        if not turns:
            after = rng.random() < 0.8
            gap = "\n" if layout.joiner == "\n" else " "
            text = listing + gap + question if after else question + gap + listing
        phrasing = f"{layout.name}/{intro.strip()}/{core}"
        answer = layout.entry.format(k=key, v=pairs[key])
        turns.append(Turn("key_value", phrasing, f"{key}={pairs[key]}", text, answer))
    return turns


def key_value(rng: random.Random, values: Values) -> Turn:
    """Find one pair among a few."""
    return lookup(rng, values, rng.randint(2, 7))[0]


JSON_FIELDS = {
    "name": ["My name is {}.", "I am {}.", "The name is {}.", "They call me {}."],
    "city": ["I live in {}.", "My home is {}.", "I come from {}.", "I moved to {}."],
    "age": ["I am {} years old.", "My age is {}.", "I just turned {}."],
    "job": ["I work as a {}.", "My job is {}.", "I am a {} by trade."],
    "color": ["My favorite color is {}.", "I like the color {}.", "I painted my house {}."],
    "item": ["I want to buy a {}.", "I would like a {}.", "I ordered a {}."],
    "price": ["It costs {} dollars.", "The price is {}.", "I paid {} dollars."],
    "day": ["Come on {}.", "We meet on {}.", "It happens on {}."],
}


def _field_value(values: Values, field: str) -> str:
    """Draw a value for one JSON field."""
    match field:
        case "age":
            return values.number(1, 99)
        case "price":
            return values.number(1, 500)
        case "day":
            return values.rng.choice(DAYS)
        case "item":
            return values.thing()
        case _:
            return getattr(values, field)()


def json_extraction(rng: random.Random, values: Values) -> Turn:
    """Write the asked fields of a short text as a JSON object, in the order asked."""
    fields = [field for field in JSON_FIELDS if field != "day" or not values.unseen]
    present = rng.sample(fields, rng.randint(1, 4))
    drawn = {field: _field_value(values, field) for field in present}
    text = " ".join(rng.choice(JSON_FIELDS[field]).format(drawn[field]) for field in present)
    asked = rng.sample(present, rng.randint(1, min(3, len(present))))
    listed = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + " and " + asked[-1]
    core = rng.randrange(len(JSON_REQUESTS))
    prompt = JSON_REQUESTS[core].format(fields=listed, text=text)
    parts = [
        f'"{field}": {drawn[field]}' if field in ("age", "price") else f'"{field}": "{drawn[field]}"' for field in asked
    ]
    return Turn("json_extraction", str(core), repr(sorted(drawn.items())), prompt, "{" + ", ".join(parts) + "}")


def with_article(word: str) -> str:
    """Return the word with "a" or "an"."""
    return ("an " if word[0] in "aeiou" else "a ") + word


def yes_no(rng: random.Random, values: Values) -> Turn:
    """Answer a closed question about capitals, sizes of numbers or categories."""
    truth = rng.random() < 0.5
    kind = rng.choice(("capital", "greater", "category"))
    if kind == "capital":
        country = rng.choice(list(CAPITALS))
        others = [city for other, city in CAPITALS.items() if other != country]
        city = CAPITALS[country] if truth else rng.choice(others)
        phrasing, text = phrase(rng, YES_NO_CAPITAL, city=city, country=country)
        item = f"{city}/{country}"
    elif kind == "greater":
        a, b = rng.sample(range(31), 2)
        a, b = (max(a, b), min(a, b)) if truth else (min(a, b), max(a, b))
        phrasing, text = phrase(rng, YES_NO_GREATER, a=str(a), b=str(b))
        item = f"{a}>{b}"
    else:
        asked = rng.choice([category for category in CATEGORIES if category != "color"])
        source = asked if truth else rng.choice([other for other in CATEGORIES if other not in (asked, "color")])
        word = rng.choice(CATEGORIES[source])
        kind_text = asked if asked == "furniture" else with_article(asked)
        article = with_article(word).split()[0]
        phrasing, text = phrase(rng, YES_NO_CATEGORY, article=article, word=word, kind=kind_text)
        item = f"{word}/{asked}"
    return Turn("yes_no", f"{kind}/{phrasing}", item, text, "Yes." if truth else "No.")


def multiple_choice(rng: random.Random, values: Values) -> Turn:
    """Choose the letter of the right option."""
    options = rng.choice((2, 3, 4, 4))
    if rng.random() < 0.65:
        kinds = rng.sample(list(CATEGORIES), options)
        words = [rng.choice(CATEGORIES[kind]) for kind in kinds]
        asked = kinds[0] if kinds[0] == "furniture" else with_article(kinds[0])
        core, cores, slots = rng.randrange(len(CHOICE_CATEGORY)), CHOICE_CATEGORY, {"kind": asked}
    else:
        countries = rng.sample(list(CAPITALS), options)
        words = [CAPITALS[country] for country in countries]
        core, cores, slots = rng.randrange(len(CHOICE_CAPITAL)), CHOICE_CAPITAL, {"country": countries[0]}
    right = words[0]
    rng.shuffle(words)
    entry, joiner = rng.choice(CHOICE_LAYOUTS)
    listing = joiner.join(entry.format(letter, word) for letter, word in zip("ABCD", words, strict=False))
    phrasing = f"{cores[core]}/{entry}/{joiner!r}"
    prompt = cores[core].format(**slots) + ("\n" if joiner == "\n" else " ") + listing
    return Turn("multiple_choice", phrasing, "/".join(words), prompt, "ABCD"[words.index(right)])


def copying(rng: random.Random, values: Values) -> Turn:
    """Repeat unseen words or numbers."""
    kinds = (values.word, values.word, values.name, values.thing, lambda: values.number(0, 9999))
    pick = rng.choice(kinds)
    text = " ".join(pick() if rng.random() < 0.8 else rng.choice(kinds)() for _ in range(rng.randint(1, 6)))
    core = rng.randrange(len(COPY_REQUESTS))
    return Turn("copying", str(core), text, COPY_REQUESTS[core].format(text=text), text)


def small_talk(rng: random.Random, values: Values) -> Turn:
    """Answer a nicety or a question about the model itself."""
    answer = rng.choice(list(SMALL_TALK))
    cores = SMALL_TALK[answer]
    phrasing, text = phrase(rng, cores, (0, 0, 0, 1, 2, LOWER_CASE))
    tail = rng.choice(TAILS)
    return Turn("small_talk", phrasing + tail, answer, text + tail, answer)


def unknown(rng: random.Random, values: Values) -> Turn:
    """Admit not knowing."""
    slots = {
        "city": values.city(),
        "unknown": values.name(),
        "name": values.name(),
        "thing": values.thing(),
        "word": values.word(),
        "adjective": rng.choice(list(OPPOSITES)),
        "language": rng.choice(LANGUAGES),
        "country": rng.choice(list(CAPITALS)),
    }
    phrasing, text = phrase(rng, UNKNOWN, (0, 0, 0, 1, 2, LOWER_CASE), **slots)
    return Turn("unknown", phrasing, text, text, "I do not know.")


def state_fact(rng: random.Random, values: Values, field: str) -> tuple[Turn, str]:
    """Return a turn in which the user tells something about themselves, and the value."""
    if field == "name":
        turn = greeting(rng, values)
        return turn, turn.item
    value = values.number(5, 99) if field == "age" else getattr(values, field)()
    statement = rng.choice(FACTS[field][0]).format(value)
    return Turn("recall", "statement", value, statement, "OK. " + FACT_ANSWERS[field].format(value)), value


def ask_fact(rng: random.Random, field: str, value: str) -> Turn:
    """Return a turn that asks for something the user told before."""
    phrasing, text = phrase(rng, FACTS[field][1])
    return Turn("recall", phrasing, value, text, FACT_ANSWERS[field].format(value))


def completion(rng: random.Random, values: Values) -> Turn:
    """Continue a plain sentence (no chat template)."""
    country = rng.choice(list(CAPITALS))
    form = rng.randrange(len(COMPLETION_FORMS))
    prefix = rng.choice(COMPLETION_PREFIXES)
    start, end = (part.format(country=country, city=CAPITALS[country]) for part in COMPLETION_FORMS[form])
    return Turn("completion", prefix.strip() + str(form), country, prefix + start, end)


RELATIONS: dict[str, dict[str, str]] = {
    "capital": CAPITALS,
    "category": {word: kind for kind, words in CATEGORIES.items() for word in words},
    "opposite": OPPOSITES | {value: key for key, value in OPPOSITES.items()},
    "plural": PLURALS,
    "digit": {word: str(number) for number, word in enumerate(NUMBER_WORDS)},
    "word": {str(number): word for number, word in enumerate(NUMBER_WORDS)},
    "next": {str(number): str(number + 1) for number in range(30)},
}


class Shots(NamedTuple):
    """A few-shot text: every example as (text before the answer, answer with its leading space)."""

    turns: list[Turn]
    joiner: str


def few_shot(rng: random.Random, held_out_query: bool, shots: int) -> Shots:
    """Return a raw text of examples of one relation; only the last may be a held-out combination."""
    relation = rng.choice([*RELATIONS, "copy"])
    layout = rng.randrange(len(SHOT_FORMATS))
    entry, arrow, joiner = SHOT_FORMATS[layout]
    if relation == "copy":
        values = Values(rng, unseen=held_out_query)
        known = {word: word for word in (values.word() for _ in range(6 * shots + 40))}
    else:
        known = RELATIONS[relation]
    items = rng.sample(list(known), len(known))
    asked = [item for item in items if is_held_out("few_shot", str(layout), f"{relation}:{item}")]
    shown = [item for item in items if item not in asked]
    chosen = shown[: shots + 1]
    if held_out_query:
        if not asked:
            return few_shot(rng, True, shots)
        chosen[-1] = asked[0]
    turns = [
        Turn("few_shot", str(layout), f"{relation}:{item}", entry.format(item) + arrow.rstrip(" "), " " + known[item])
        for item in chosen
    ]
    return Shots(turns, joiner)


CHAT_TASKS: dict[str, tuple[Callable[[random.Random, Values], Turn], float]] = {
    "greeting": (greeting, 1.2),
    "capitals": (capitals, 0.5),
    "capitals_lower": (capitals_lower, 0.5),
    "counting": (counting, 1.5),
    "sums": (sums, 0.6),
    "key_value": (key_value, 0.7),
    "json_extraction": (json_extraction, 5.0),
    "yes_no": (yes_no, 0.4),
    "multiple_choice": (multiple_choice, 0.3),
    "copying": (copying, 0.9),
    "small_talk": (small_talk, 0.5),
    "unknown": (unknown, 0.3),
}
"""Every single-turn chat task with its share of the training turns."""


def draw(rng: random.Random, task: str, *, held_out: bool) -> Turn:
    """Draw a turn of a chat task from one side of the split."""
    values = Values(rng, unseen=held_out)
    make = CHAT_TASKS[task][0]
    while True:
        turn = make(rng, values)
        if is_held_out(turn.task, turn.phrasing, turn.item) == held_out:
            return turn


def training_turn(rng: random.Random) -> Turn:
    """Draw a training turn of a random chat task."""
    names = list(CHAT_TASKS)
    task = rng.choices(names, [CHAT_TASKS[name][1] for name in names])[0]
    return draw(rng, task, held_out=False)


def training_completion(rng: random.Random) -> Turn:
    """Draw a plain sentence from the training side."""
    while True:
        turn = completion(rng, Values(rng, unseen=False))
        if not is_held_out(turn.task, turn.phrasing, turn.item):
            return turn


def ask_fact_on_side(rng: random.Random, field: str, value: str, *, held_out: bool) -> Turn | None:
    """Ask for a fact on one side of the split, or return None if a few draws find no such combination."""
    for _ in range(200):
        turn = ask_fact(rng, field, value)
        if is_held_out(turn.task, turn.phrasing, turn.item) == held_out:
            return turn
    return None


def recall_case(rng: random.Random) -> Case | None:
    """Return a dialogue that tells one to three unseen facts, talks of other things, and asks for one of them."""
    values = Values(rng, unseen=True)
    fields = rng.sample(list(FACTS), rng.randint(1, 3))
    told = {field: state_fact(rng, values, field) for field in fields}
    asked = rng.choice(fields)
    question = ask_fact_on_side(rng, asked, told[asked][1], held_out=True)
    if question is None:
        return None
    turns = [turn for turn, _ in told.values()]
    for _ in range(rng.randint(0, 4)):
        turns.insert(rng.randint(0, len(turns)), other_turn(rng))
    messages = as_messages([*turns, question])
    return Case("recall", messages[:-1], question.answer, f"recall|{question.phrasing}|{question.item}")


def other_turn(rng: random.Random) -> Turn:
    """Draw a training turn that does not tell the user's name."""
    while True:
        turn = training_turn(rng)
        if turn.task != "greeting":
            return turn


def as_messages(turns: list[Turn]) -> list[Message]:
    """Return the turns as chat messages, the last answer included."""
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.prompt})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def _draw_case(rng: random.Random, task: str) -> Case | None:
    """Draw one held-out case of a task; None asks for another try."""
    if task == "recall":
        return recall_case(rng)
    if task == "few_shot":
        shots = few_shot(rng, True, rng.randint(3, 6))
        turn = shots.turns[-1]
        prompt = shots.joiner.join(t.prompt + t.answer for t in shots.turns[:-1]) + shots.joiner + turn.prompt
        return Case(task, prompt, turn.answer, f"{task}|{turn.phrasing}|{turn.item}")
    if task == "completion":
        turn = completion(rng, Values(rng, unseen=True))
        if not is_held_out(turn.task, turn.phrasing, turn.item):
            return None
        return Case(task, turn.prompt, turn.answer, f"{task}|{turn.phrasing}|{turn.item}")
    if task == "long_lookup":
        turn = lookup(rng, Values(rng, unseen=True), 70)[0]
        key = f"key_value|{turn.phrasing}|{turn.item}"
        return Case(task, [{"role": "user", "content": turn.prompt}], turn.answer, key)
    turn = draw(rng, task, held_out=True)
    return Case(
        task, [{"role": "user", "content": turn.prompt}], turn.answer, f"{turn.task}|{turn.phrasing}|{turn.item}"
    )


EVALUATED = [*CHAT_TASKS, "recall", "few_shot", "completion", "long_lookup"]


def held_out_cases(task: str, count: int = 200, seed: int = 7) -> list[Case]:
    """Return `count` distinct held-out cases of a task, the same ones at every call."""
    rng = random.Random(f"{task}/{seed}")
    cases: dict[str, Case] = {}
    while len(cases) < count:
        case = _draw_case(rng, task)
        if case is not None:
            cases.setdefault(case.combination, case)
    return list(cases.values())
