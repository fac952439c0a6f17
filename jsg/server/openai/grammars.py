"""`/v1/grammars` and `/v1/vocabulary`: compiled grammars for whoever runs the model elsewhere, such as a browser."""

import collections
from typing import Annotated, final

from fastapi import Depends, Request
from pydantic import Field
from starlette.responses import Response

from jsg.byte_cache import ByteCache
from jsg.constrained.files import digest_of
from jsg.constrained.special_tokens import check_names
from jsg.errors import NotFoundError, RequestError
from jsg.server.caller import CurrentCaller
from jsg.server.front import ReadyFront
from jsg.server.http.body import ClientNames
from jsg.server.http.etags import respond_with_file
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.openai.response_format import GrammarFields
from jsg.server.shared.constraint import field_of
from jsg.server.shared.fields import MODEL
from jsg.types import GrammarSpec, SamplingParams
from jsg.waits import WaitReason, waiting

KEPT_BYTES = 64 * 2**20
BYTES_PER_ROW = 8  # of a vocabulary, as text
OF_A_KEY = {"Vary": "Authorization, X-Api-Key, Origin"}
NEVER_CHANGES = {"Cache-Control": "private, max-age=31536000, immutable", **OF_A_KEY}
ASK_AGAIN = {"Cache-Control": "private, no-cache", **OF_A_KEY}

router = new_router()


class Binary(Response):
    """The kind of response that the description of the interface names."""

    media_type = "application/octet-stream"


@final
class KeptGrammars:
    """The grammars that each tenant had compiled last, by digest.

    Each tenant has the same share of the memory. So nobody can push out the grammars of another tenant, or learn of
    them.
    """

    def __init__(self, num_tenants: int) -> None:
        self.share = share = KEPT_BYTES // num_tenants
        self._kept = collections.defaultdict[str, ByteCache[str, bytes]](lambda: ByteCache(share, len))

    def put(self, tenant: str, tables: bytes) -> str:
        """Keeps a grammar and returns its digest. Raises RequestError where it is larger than a share."""
        if len(tables) > self.share:
            raise RequestError(
                f"a compiled grammar may have {self.share} bytes, but this one has {len(tables)}; simplify it, or "
                "export it with 'jsg grammar export'"
            )
        digest = digest_of(tables)
        self._kept[tenant].put(digest, tables)
        return digest

    def get(self, tenant: str, digest: str) -> bytes | None:
        """The tenant's grammar, which counts as used; None where it is not, or no longer, kept."""
        return self._kept[tenant].get(digest)


async def _kept_grammars(request: Request) -> KeptGrammars:
    return request.app.state.grammars


Kept = Annotated[KeptGrammars, Depends(_kept_grammars)]


class GrammarBody(GrammarFields):
    """What `/v1/grammars` takes: one grammar, in any of the fields of chat completions."""

    model: str | None = Field(None, description=MODEL)

    def client_names(self) -> ClientNames:
        """As `Body.client_names`."""
        return ClientNames(grammar=field_of(self.constraint()))

    def spec(self) -> GrammarSpec:
        """The grammar. Raises RequestError."""
        constraint = self.constraint()
        if constraint is None:
            raise RequestError("the body must have a grammar, but has none; send one, such as json_schema or regex")
        grammar = SamplingParams.from_dict({constraint.kind: constraint.value, **self.grammar_options()}).grammar
        assert isinstance(grammar, GrammarSpec), "it was given in a field for grammars"
        return grammar


@router.post("/v1/grammars")
async def compile_grammar(
    body: GrammarBody, request: Request, caller: CurrentCaller, front: ReadyFront, kept: Kept
) -> Response:
    """Compiles a grammar and keeps the tables for a while, for the same key: its digest names them."""
    front.check_model(body.model)
    grammar = body.spec()
    check_names(grammar, front.generator.markers)
    with front.generator.admission.grammar(caller.tenant), waiting(WaitReason.GRAMMAR):
        tables = await until_disconnect(request, front.client.grammars.tables(grammar, caller.tenant))
    digest = kept.put(caller.tenant, tables)
    return json_response({"object": "grammar", "digest": digest, "bytes": len(tables)})


@router.get("/v1/grammars/{digest}", response_class=Binary)
async def get_grammar(digest: str, request: Request, caller: CurrentCaller, kept: Kept) -> Response:
    """Gives the tables of a grammar that the same key had compiled lately, as `jsg grammar export` writes them."""
    tables = kept.get(caller.tenant, digest)
    if tables is None:
        raise NotFoundError(
            f"digest must name a grammar that this key had compiled lately, but {digest[:100]!r} is not found: it was "
            "never compiled, or was dropped for want of room; send the grammar to /v1/grammars again"
        )
    return respond_with_file(request, tables, f'"{digest}"', Binary.media_type, NEVER_CHANGES)


@router.get("/v1/vocabulary", response_class=Binary)
async def get_vocabulary(request: Request, front: ReadyFront) -> Response:
    """Gives the vocabulary of the served model, which its grammars need, as `jsg grammar export` writes it."""
    size = BYTES_PER_ROW * front.generator.info.vocab_size
    content = await front.threads.run(lambda: front.vocabulary, size)
    return respond_with_file(request, content, f'"{digest_of(content)}"', Binary.media_type, ASK_AGAIN)
