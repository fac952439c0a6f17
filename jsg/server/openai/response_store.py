"""Responses that clients may continue or read again. They are kept in memory, apart for each key."""

import array
import collections
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Literal, final

MAX_RESPONSES = 10_000
MAX_BYTES = 128 * 2**20
MAX_AGE_S = 24 * 3600.0
OBJECT_BYTES = 400  # a turn takes about so much besides its text and its tokens

Role = Literal["system", "developer", "user", "assistant", "tool"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a message.

    Attributes:
        place: How many characters of the message's text stand before it.
        url: The URL that the client sent: most often the file itself, as a `data:` URL.
    """

    place: int
    url: str


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One item of a conversation: a message, thoughts before it, a call of a tool, or the result of a call.

    Attributes:
        item_id: Its name in lists of items.
        text: The text of a message, the arguments of a call as the chat template gets them, the text of a result, or
            thoughts.
        token_ids: The tokens that the model wrote, without the end of its turn; empty where a client wrote the text.
        is_whole: False for an answer that was cut short.
        call_id: The name that a call and its result share; None in a message.
        name: The name of the tool: always in a call, in a result where the client gives it.
        pictures: The pictures of a message.
        places: How many characters of the text stand before each place from which other requests are likely to go on.
        is_thought: Whether it has the assistant's thoughts before the message or the calls that follow.
        namespace: Of a call: the namespace of the tool; None for none.
        called: Of a call and its result: what kind of tool is called, in OpenAI's words.
    """

    item_id: str
    role: Role
    text: str
    token_ids: Sequence[int] = ()
    is_whole: bool = True
    call_id: str | None = None
    name: str | None = None
    pictures: tuple[Picture, ...] = ()
    places: tuple[int, ...] = ()
    is_thought: bool = False
    namespace: str | None = None
    called: Literal["function", "custom_tool", "local_shell"] = "function"

    @property
    def pieces(self) -> list[str | Picture]:
        """The texts and the pictures in order, without empty texts; one empty text where there is nothing else."""
        pieces: list[str | Picture] = []
        place = 0
        for picture in self.pictures:
            pieces += [self.text[place : picture.place], picture]
            place = picture.place
        return [piece for piece in [*pieces, self.text[place:]] if piece] or [""]

    def says_the_same(self, other: "Turn") -> bool:
        """Whether another turn says the same, whatever its name, its tokens and its places are."""
        names = ("role", "text", "call_id", "name", "pictures", "is_thought", "namespace", "called")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def is_result(self) -> bool:
        """Whether it is the result of a call."""
        return self.role == "tool"

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, approximately."""
        names = sum(map(sys.getsizeof, (self.call_id, self.name, self.namespace)))
        urls = sum(OBJECT_BYTES + sys.getsizeof(picture.url) for picture in self.pictures)
        return OBJECT_BYTES + sys.getsizeof(self.text) + sys.getsizeof(self.token_ids) + names + urls


@final
@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        response_id: Its name.
        shown: The response object as JSON.
        turns: The whole conversation without instructions.
        num_output: How many turns, at the end, are the answer.
    """

    response_id: str
    shown: bytes
    turns: tuple[Turn, ...]
    num_output: int = 1

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, approximately. Turns that it shares with an earlier response count for both."""
        return OBJECT_BYTES + len(self.shown) + sum(turn.num_bytes for turn in self.turns)


@final
class ResponseStore:
    """The responses of all tenants.

    Each tenant has the same share of the memory, and loses its own least recently used responses when its share is
    full. So nobody can push out the responses of another tenant, or learn about them.
    """

    def __init__(
        self,
        num_tenants: int = 1,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        self._max_responses = max(1, max_responses // num_tenants)
        self._max_bytes = max_bytes // num_tenants
        self._max_age_s = max_age_s
        self._shelves: dict[str, _Shelf] = {}

    def put(self, tenant: str, response: StoredResponse) -> bool:
        """Keeps a response. Returns False for one that is larger than its tenant's whole share."""
        if response.num_bytes > self._max_bytes:
            return False
        shelf = self._shelf(tenant)
        shelf.add(response, time.monotonic())
        while len(shelf) > self._max_responses or shelf.num_bytes > self._max_bytes:
            shelf.drop_oldest()
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response of that name, which counts as used; None where it is not, or no longer, kept."""
        return self._shelf(tenant).use(response_id)

    def turn(self, tenant: str, item_id: str) -> Turn | None:
        """The item of that name in one of the tenant's responses. Names of items contain the name of their response."""
        response = self.get(tenant, "resp_" + item_id.partition("_")[2].partition("_")[0])
        return next((turn for turn in response.turns if turn.item_id == item_id), None) if response else None

    def remove(self, tenant: str, response_id: str) -> bool:
        """Drops a response. Returns False where it is not kept."""
        return self._shelf(tenant).drop(response_id)

    def num_bytes(self, tenant: str) -> int:
        """The memory that the tenant's responses take, approximately."""
        return self._shelf(tenant).num_bytes

    def _shelf(self, tenant: str) -> "_Shelf":
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.drop_before(time.monotonic() - self._max_age_s)
        return shelf


@final
class _Shelf:
    """One tenant's responses. Invariant: `num_bytes` is the sum of their `num_bytes`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_use: collections.OrderedDict[str, StoredResponse] = collections.OrderedDict()
        self._added_at: dict[str, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._by_use)

    def add(self, response: StoredResponse, now: float) -> None:
        """Adds a response whose name is new."""
        self._by_use[response.response_id] = response
        self._added_at[response.response_id] = now
        self.num_bytes += response.num_bytes

    def use(self, response_id: str) -> StoredResponse | None:
        """The response of that name, which becomes the most recently used one; None where there is none."""
        if response_id in self._by_use:
            self._by_use.move_to_end(response_id)
        return self._by_use.get(response_id)

    def drop(self, response_id: str) -> bool:
        """Drops the response of that name. Returns False where there is none."""
        response = self._by_use.pop(response_id, None)
        if response is None:
            return False
        del self._added_at[response_id]
        self.num_bytes -= response.num_bytes
        return True

    def drop_oldest(self) -> None:
        """Drops the least recently used response."""
        self.drop(next(iter(self._by_use)))

    def drop_before(self, limit: float) -> None:
        """Drops the responses that were added before that time."""
        while self._added_at and next(iter(self._added_at.values())) < limit:
            self.drop(next(iter(self._added_at)))


def compact(token_ids: Sequence[int]) -> Sequence[int]:
    """The tokens in an array of four bytes each."""
    return array.array("i", token_ids)
