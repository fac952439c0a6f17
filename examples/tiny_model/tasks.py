"""The generated text the tiny model learns from, and the split that keeps the evaluation honest.

A task draws turns. A turn is a combination of a *phrasing* (lead, core sentence and style, or a layout) and an *item*
(what is asked about). `is_held_out(task, phrasing, item)` decides by a committed hash whether a combination belongs to
training or to the evaluation; each side redraws until the combination is its own. Invented values (names, cities,
numbers) are split the same way, so evaluated values are unseen too, except in the tasks that ask for knowledge.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

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


LEADS = [
    *[""] * 8,
    *("Please: ", "Hello! ", "Tell me: ", "Quick question: ", "Hey, ", "OK. ", "Next question: ", "Now this: "),
    *("Hi. ", "I have a question. "),
]
"""What may stand before a request; nothing, nearly half of the time."""


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


GREETINGS = [
    "Hi, my name is {name}.",
    "Hello, I am {name}.",
    "My name is {name}.",
    "Hi! I'm {name}.",
    "Hey, this is {name}.",
    "Good morning, my name is {name}.",
    "Good evening! I am {name}.",
    "You can call me {name}.",
    "Hello there, {name} here.",
    "Nice to meet you, I am {name}.",
    "I am called {name}.",
    "Let me introduce myself: I am {name}.",
]


def greeting(rng: random.Random, values: Values) -> Turn:
    """Greet a known or unseen user by name."""
    name = rng.choice(NAMES) if rng.random() < 0.4 else values.name()
    if is_held_out("value", name.lower()) and not values.unseen:
        name = values.name()
    phrasing, text = phrase(rng, GREETINGS, name=name)
    return Turn("greeting", phrasing, name, text, f"Hello, {name}! How can I help you?")


CAPITAL_QUESTIONS = [
    "What is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "What's the capital city of {country}?",
    "Do you know the capital of {country}?",
    "Capital of {country}?",
    "What is {country}'s capital?",
    "Can you tell me what the capital of {country} is?",
    "I want to know the capital of {country}.",
    "{country}: what is its capital?",
    "Give me the capital of {country}.",
]


def capitals(rng: random.Random, values: Values, styles: tuple[int, ...] = STYLES) -> Turn:
    """Name the capital of one of the listed countries."""
    country = rng.choice(list(CAPITALS))
    phrasing, text = phrase(rng, CAPITAL_QUESTIONS, styles, country=country)
    return Turn("capitals", phrasing, country, text, f"The capital of {country} is {CAPITALS[country]}.")


def capitals_lower(rng: random.Random, values: Values) -> Turn:
    """Name the capital of a country whose name is in lower case."""
    return capitals(rng, values, (LOWER_CASE,))


COUNT_UP = [
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Give me all numbers from {a} to {b}.",
    "Numbers from {a} to {b}, please.",
    "Start at {a} and count to {b}.",
    "Say the numbers between {a} and {b}.",
]
COUNT_DOWN = ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Go down from {a} to {b}."]


def counting(rng: random.Random, values: Values) -> Turn:
    """Count between two numbers up to 40, in either direction."""
    low = rng.randint(0, 30)
    high = low + rng.randint(2, 10)
    down = rng.random() < 0.2
    first, last = (high, low) if down else (low, high)
    phrasing, text = phrase(rng, COUNT_DOWN if down else COUNT_UP, a=str(first), b=str(last))
    numbers = range(high, low - 1, -1) if down else range(low, high + 1)
    return Turn("counting", phrasing, f"{first}-{last}", text, ", ".join(map(str, numbers)))


SUM_QUESTIONS = [
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "{a} + {b} = ?",
    "How much is {a} + {b}?",
    "Calculate {a} plus {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b}",
    "Can you add {a} and {b}?",
]


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
JSON_REQUESTS = [
    "Extract {fields} as JSON: {text}",
    "Extract {fields} as JSON.\n{text}",
    "{text} Extract {fields} as JSON.",
    "Return JSON with {fields}. Text: {text}",
    "{text}\nGive me {fields} as JSON.",
    "Read the text and answer in JSON with the keys {fields}: {text}",
    "JSON with {fields}, please: {text}",
    "Turn this into JSON with {fields}: {text}",
    "Text: {text}\nKeys: {fields}\nJSON:",
    "Find {fields} in this text and write JSON. {text}",
]


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


YES_NO_CAPITAL = [
    "Is {city} the capital of {country}?",
    "{city} is the capital of {country}. Yes or no?",
    "True or not: the capital of {country} is {city}?",
]
YES_NO_GREATER = [
    "Is {a} greater than {b}?",
    "Is {a} more than {b}?",
    "Yes or no: {a} is bigger than {b}?",
    "Is the number {a} larger than {b}?",
]
YES_NO_CATEGORY = [
    "Is {article} {word} {kind}?",
    "Yes or no: is {article} {word} {kind}?",
    "Would you say that {article} {word} is {kind}?",
    "Is it true that {article} {word} is {kind}?",
]


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


CHOICE_CATEGORY = [
    "Which one is {kind}?",
    "Which of these is {kind}?",
    "Choose the one that is {kind}.",
    "Pick {kind}.",
    "Select {kind} from the list.",
    "What here is {kind}?",
]
CHOICE_CAPITAL = [
    "What is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Choose the capital of {country}.",
    "Pick the capital of {country}.",
]
CHOICE_LAYOUTS = [("{}) {}", "\n"), ("{}. {}", "\n"), ("{}: {}", "\n"), ("{}) {}", " "), ("({}) {}", " ")]


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


COPY_REQUESTS = [
    "Repeat: {text}",
    "Copy this: {text}",
    "Say: {text}",
    "Please repeat after me: {text}",
    "Repeat the following words.\n{text}",
    "Write exactly this: {text}",
    'Repeat "{text}"',
    "{text}\nRepeat the line above.",
    "Echo {text}",
    "Type this again: {text}",
]


def copying(rng: random.Random, values: Values) -> Turn:
    """Repeat unseen words or numbers."""
    kinds = (values.word, values.word, values.name, values.thing, lambda: values.number(0, 9999))
    pick = rng.choice(kinds)
    text = " ".join(pick() if rng.random() < 0.8 else rng.choice(kinds)() for _ in range(rng.randint(1, 6)))
    core = rng.randrange(len(COPY_REQUESTS))
    return Turn("copying", str(core), text, COPY_REQUESTS[core].format(text=text), text)


SMALL_TALK = {
    "I am jsg-tiny, a small demonstration model that ships with jsg.": [
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Tell me about yourself.",
        "Introduce yourself.",
        "Are you a human?",
        "Which model are you?",
        "Who am I talking to?",
        "Are you a robot?",
    ],
    "You are welcome!": [
        "Thanks!",
        "Thank you.",
        "Thank you very much!",
        "Thanks a lot.",
        "Great, thanks.",
        "That was helpful, thank you.",
        "Many thanks!",
    ],
    "Goodbye! Have a nice day.": [
        "Bye!",
        "Goodbye.",
        "See you later.",
        "I have to go now.",
        "Good night!",
        "See you tomorrow.",
        "Bye bye!",
    ],
    "I can greet you, name capitals, add small numbers, count, look things up in your text and write small JSON.": [
        "What can you do?",
        "Help!",
        "How can you help me?",
        "What are you good at?",
        "What do you know?",
        "Which tasks can you do?",
        "Show me what you can do.",
    ],
    "I am fine, thank you! How can I help you?": [
        "How are you?",
        "How do you do?",
        "How is it going?",
        "Are you well?",
        "How are you today?",
        "How are you doing?",
    ],
    "Hello! How can I help you?": [
        "Hello!",
        "Hi!",
        "Hey!",
        "Good morning!",
        "Hello there.",
        "Good evening.",
        "Greetings!",
    ],
    "I am good at simple things only, but I am happy to help.": [
        "You are great!",
        "You are smart.",
        "I like you.",
        "Well done!",
        "Good job.",
        "You are very clever.",
    ],
}
TAILS = ["", "", "", "", " I am curious.", " Please answer.", " :)", " My friend.", " So?"]


def small_talk(rng: random.Random, values: Values) -> Turn:
    """Answer a nicety or a question about the model itself."""
    answer = rng.choice(list(SMALL_TALK))
    cores = SMALL_TALK[answer]
    phrasing, text = phrase(rng, cores, (0, 0, 0, 1, 2, LOWER_CASE))
    tail = rng.choice(TAILS)
    return Turn("small_talk", phrasing + tail, answer, text + tail, answer)


UNKNOWN = [
    "What is the weather in {city}?",
    "What is the capital of {unknown}?",
    "Who won the game in {city}?",
    "What is the phone number of {name}?",
    "How do I repair a {thing}?",
    "Why is the {thing} so {adjective}?",
    "Write a poem about a {thing}.",
    "Translate {word} into {language}.",
    "Who is the president of {country}?",
    "How many people live in {country}?",
    "What does {word} mean?",
    "When was {name} born?",
    "Tell me a story about {name}.",
    "How far is {city} from {country}?",
    "Explain how a {thing} works.",
    "Write a program that sorts {word}.",
    "What time is it in {city}?",
    "Should I buy a {thing} or a {word}?",
    "Who invented the {thing}?",
    "What is the meaning of {word}?",
    "Where can I buy a {adjective} {thing}?",
    "How old is {name}?",
    "Give me a recipe with {word}.",
    "Why do people like {country}?",
]
LANGUAGES = "French German Spanish Italian Latin Greek Russian Japanese Chinese Dutch".split()


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


FACTS = {
    "name": (["My name is {}.", "I am called {}."], ["What is my name?", "Do you remember my name?", "Who am I?"]),
    "city": (
        ["I live in {}.", "My home is {}."],
        ["Where do I live?", "Which city do I live in?", "In which city am I?"],
    ),
    "thing": (["I have a {}.", "I bought a {}."], ["What do I have?", "Which thing do I have?", "What did I buy?"]),
    "job": (["I am a {}.", "I work as a {}."], ["What is my job?", "What do I do?", "What is my work?"]),
    "color": (
        ["My favorite color is {}.", "I like the color {}."],
        ["What is my favorite color?", "Which color do I like?", "What color do I like best?"],
    ),
    "age": (["I am {} years old.", "My age is {}."], ["How old am I?", "What is my age?", "Do you know my age?"]),
}
FACT_ANSWERS = {
    "name": "Your name is {}.",
    "city": "You live in {}.",
    "thing": "You have a {}.",
    "job": "You are a {}.",
    "color": "Your favorite color is {}.",
    "age": "You are {} years old.",
}


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


COMPLETION_FORMS = [
    ("The capital of {country} is", " {city}."),
    ("{city} is the capital of", " {country}."),
    ("{country}'s capital is", " {city}."),
    ("Q: What is the capital of {country}?\nA:", " {city}"),
    ("Question: What is the capital of {country}?\nAnswer:", " {city}"),
    ("Country: {country}\nCapital:", " {city}"),
    ("The capital city of {country} is called", " {city}."),
    ("In {country}, the capital is", " {city}."),
    ("I went to {country} and visited its capital,", " {city}."),
    ("The largest embassy in {country} is in its capital,", " {city}."),
    ("People in {country} know that their capital is", " {city}."),
    ("Capital of {country}:", " {city}"),
]
COMPLETION_PREFIXES = ["", "", "", "Facts. ", "Geography: ", "As we know, ", "Note: ", "Lesson 1. "]


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
SHOT_FORMATS = [
    ("{}", " -> ", "\n"),
    ("{}", ": ", "\n"),
    ("{}", " = ", "\n"),
    ("{}", " => ", "\n"),
    ("Input: {}", "\nOutput: ", "\n\n"),
    ("Q: {}", "\nA: ", "\n\n"),
    ("{}", " | ", "\n"),
    ("Input: {}", "\nOutput: ", "\n"),
    ("- {}", ": ", "\n"),
    ("{}", " - ", "\n"),
]


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
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are jsg-tiny.",
    "Be polite and short.",
]


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
