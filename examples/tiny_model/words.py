"""Word lists of the tiny model's generated text, and the open pools of invented values.

Every list is written by hand; every other word is invented from syllables. `Values` hands out names and words in two
disjoint halves, so that an evaluation can use values that no training text ever contained.
"""

import hashlib
import random

SALT = b"jsg-tiny-1"
"""Committed salt of the split. Changing it changes what is held out, so the weights must be trained again."""
HELD_OUT_PERMILLE = 130

CAPITALS = dict(
    pair.split("=")
    for pair in (
        "France=Paris,Germany=Berlin,Italy=Rome,Spain=Madrid,Portugal=Lisbon,England=London,Scotland=Edinburgh,"
        "Ireland=Dublin,Norway=Oslo,Sweden=Stockholm,Denmark=Copenhagen,Finland=Helsinki,Iceland=Reykjavik,"
        "Poland=Warsaw,Austria=Vienna,Hungary=Budapest,Greece=Athens,Turkey=Ankara,Russia=Moscow,Ukraine=Kyiv,"
        "Romania=Bucharest,Bulgaria=Sofia,Serbia=Belgrade,Croatia=Zagreb,Belgium=Brussels,Switzerland=Bern,"
        "Netherlands=Amsterdam,Estonia=Tallinn,Latvia=Riga,Lithuania=Vilnius,Japan=Tokyo,China=Beijing,India=Delhi,"
        "Thailand=Bangkok,Vietnam=Hanoi,Korea=Seoul,Indonesia=Jakarta,Nepal=Kathmandu,Mongolia=Ulaanbaatar,"
        "Iran=Tehran,Iraq=Baghdad,Israel=Jerusalem,Jordan=Amman,Lebanon=Beirut,Qatar=Doha,Egypt=Cairo,Morocco=Rabat,"
        "Tunisia=Tunis,Kenya=Nairobi,Ethiopia=Ababa,Ghana=Accra,Nigeria=Abuja,Senegal=Dakar,Canada=Ottawa,"
        "Mexico=Mexico,Cuba=Havana,Brazil=Brasilia,Peru=Lima,Chile=Santiago,Colombia=Bogota,Ecuador=Quito,"
        "Venezuela=Caracas,Australia=Canberra"
    ).split(",")
)
CAPITALS.update({"Mexico": "Mexico City", "Ethiopia": "Addis Ababa"})

CATEGORIES = {
    "animal": "cat dog horse cow pig lion tiger bear wolf fox mouse rabbit sheep goat duck eagle fish shark".split(),
    "color": "red blue green yellow black white orange purple pink brown gray".split(),
    "fruit": "apple banana pear grape lemon cherry peach plum mango melon".split(),
    "tool": "hammer saw drill wrench axe shovel knife ladder".split(),
    "vehicle": "car bus train boat truck bike plane ship tram".split(),
    "drink": "water milk juice tea coffee beer wine soda".split(),
    "instrument": "piano guitar violin drum flute trumpet harp cello".split(),
    "furniture": "chair table bed sofa desk shelf lamp bench".split(),
}

OPPOSITES = dict(
    pair.split("=")
    for pair in (
        "hot=cold,big=small,up=down,left=right,fast=slow,happy=sad,old=young,rich=poor,day=night,open=closed,hard=soft,"
        "high=low,long=short,dry=wet,full=empty,good=bad,early=late,light=dark,loud=quiet,strong=weak,true=false,"
        "first=last,clean=dirty,near=far,yes=no,wide=narrow"
    ).split(",")
)
PLURALS = {
    word: word + "s"
    for word in (
        "cat dog car book tree house chair table apple lamp pen cup bird shoe hat key ring road star boat"
    ).split()
}
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()

NAMES = (
    "Anna Ben Carla David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Quinn Rosa Sam Tina Uma "
    "Victor Wendy Xavier Yara Zoe Alice Bob Charlie Diana Eric Fiona George Hannah Ivan Julia Kevin Laura Mark Nora "
    "Oliver Peter Rachel Simon Thomas Ursula Vera Walter Adam Bella Chris Daniel Elena Felix Gina Hugo Ines James Karl "
    "Linda Martin Nadia Omar Priya Robert Sarah Tom Valerie William Yusuf Amir Chen Diego Fatima Ingrid Jonas Kenji "
    "Lucia Mei Noah Olga Pedro Ravi Sofia Tariq Aisha Bruno Clara Dmitri Eva John Mary Michael Susan Jonathan Patricia "
    "Elizabeth Richard Joseph Jessica Matthew Nancy Anthony Lisa Margaret Andrew Emily Joshua Michelle Brian Amanda "
    "Ryan Stephanie Jason Rebecca Justin Catherine Brandon Samuel Gregory Alexander Patrick Raymond Dennis Jerry"
).split()
THINGS = (
    "lamp book key ring hat cup pen ball clock phone camera basket bottle box brush button candle card coat coin comb "
    "cookie drum feather flag fork glove guitar hammer helmet jacket kite ladder letter map mirror needle notebook "
    "paddle pencil pillow plate pot radio ribbon rope scarf shell shoe spoon stamp stone sword ticket towel toy tray "
    "umbrella vase violin wallet watch whistle wheel"
).split()
JOBS = (
    "baker pilot doctor nurse teacher lawyer farmer painter singer writer driver miner dentist judge chef clerk actor "
    "engineer plumber sailor soldier tailor waiter guard coach barber butcher florist gardener librarian"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl st tr sh ch th".split()
_VOWELS = "a e i o u ai ea ee oo ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "ck", "nd", "x"]


KNOWN_WORDS = {
    word.lower()
    for group in (
        CAPITALS,
        CAPITALS.values(),
        OPPOSITES,
        OPPOSITES.values(),
        PLURALS,
        NUMBER_WORDS,
        *CATEGORIES.values(),
    )
    for word in group
}
"""Words that the knowledge tasks train on, so never an unseen value."""
LARGEST_TRAINED_NUMBER = 41
"""Counting and sums train on every number up to this one, so a smaller number is never an unseen value."""


def bucket(*parts: str) -> int:
    """Return the split bucket of a combination, 0..999; below `HELD_OUT_PERMILLE` it is held out."""
    digest = hashlib.blake2b("|".join(parts).encode(), key=SALT, digest_size=8).digest()
    return int.from_bytes(digest, "big") % 1000


def is_held_out(*parts: str) -> bool:
    """Return whether a combination such as (task, phrasing, item) belongs to the evaluation."""
    return bucket(*parts) < HELD_OUT_PERMILLE


def invented_word(rng: random.Random, syllables: int) -> str:
    """Return a pronounceable word that means nothing, e.g. "brontal"."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)]
    return "".join(parts)


class Values:
    """Random values from the half of the value space that training uses, or from the half it never sees."""

    def __init__(self, rng: random.Random, *, unseen: bool) -> None:
        """Draw from `rng`; with `unseen` every open value is one that `is_held_out` keeps out of training."""
        self.rng = rng
        self.unseen = unseen

    def _admit(self, draw) -> str:
        """Draw until the value lies in this half."""
        while True:
            value = draw()
            if is_held_out("value", value.lower()) != self.unseen:
                continue
            if self.unseen and (
                value.lower() in KNOWN_WORDS or (value.isdigit() and int(value) <= LARGEST_TRAINED_NUMBER)
            ):
                continue
            return value

    def word(self) -> str:
        """Return an invented lower-case word or a known thing."""
        rng = self.rng
        return self._admit(
            lambda: rng.choice(THINGS) if rng.random() < 0.3 else invented_word(rng, rng.choice((1, 2, 2)))
        )

    def thing(self) -> str:
        """Return something a person can have."""
        rng = self.rng
        return self._admit(lambda: rng.choice(THINGS) if rng.random() < 0.6 else invented_word(rng, 2))

    def name(self) -> str:
        """Return a first name, half of them invented."""
        rng = self.rng
        return self._admit(lambda: rng.choice(NAMES) if rng.random() < 0.5 else invented_word(rng, 2).capitalize())

    def city(self) -> str:
        """Return a city, most of them invented."""
        rng = self.rng
        known = [city for city in CAPITALS.values() if " " not in city]
        return self._admit(
            lambda: rng.choice(known) if rng.random() < 0.3 else invented_word(rng, rng.choice((2, 2, 3))).capitalize()
        )

    def job(self) -> str:
        """Return a profession, some of them invented."""
        rng = self.rng
        return self._admit(lambda: rng.choice(JOBS) if rng.random() < 0.5 else invented_word(rng, 2))

    def color(self) -> str:
        """Return a color, some of them invented."""
        rng = self.rng
        return self._admit(lambda: rng.choice(CATEGORIES["color"]) if rng.random() < 0.5 else invented_word(rng, 2))

    def number(self, low: int, high: int) -> str:
        """Return a decimal number between both bounds, inclusive."""
        return self._admit(lambda: str(self.rng.randint(low, high)))
