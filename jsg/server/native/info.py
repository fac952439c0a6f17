"""What the server runs and how busy it is. No answer here has a secret, a path or an address."""

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any

from starlette.responses import Response

import jsg
from jsg.cache.block_events import block_tokens_of
from jsg.engine.front.kv_addresses import published_at
from jsg.errors import EngineDeadError, TimeLimitError
from jsg.server.front import Front, ReadyFront, public_name, state_of
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.waits import WaitReason, stat_of

HIDDEN_KNOBS = frozenset(
    {
        *("api_key", "api_key_file", "admin_api_key"),
        *("host", "port", "cors_allow_origin", "allowed_media_host", "otlp_traces_endpoint"),
        *("dist_init_addr", "compilation_cache_dir", "profile_dir", "programs"),
        *("kv_events_endpoint", "kv_events_topic"),
    }
)  # secrets, addresses, and paths of this machine
WEIGHT_VERSION = "default"  # weights are loaded once and never changed

router = new_router()


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(front: ReadyFront) -> Response:
    """Describes the loaded model."""
    return json_response(
        _model_info(front) | {"is_generation": front.client.info.embedder is None, "weight_version": WEIGHT_VERSION}
    )


@router.get("/get_chat_template")
async def chat_template(front: ReadyFront) -> Response:
    """Gives the chat template, BOS and EOS, for clients that write turns themselves; null if the model has none.

    `placeholders` has the tokens that stand for a picture and for a video, if the model sees. `keeps_files` is true if
    a file that was sent as a part of a prompt may be named by its SHA-256 later, and `sends_increments` if `/generate`
    takes `incremental`.
    """
    tokenizer = front.generator.tokenizer
    return json_response(
        {
            "chat_template": tokenizer.chat_template,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "placeholders": front.media.placeholders,
            "keeps_files": front.media.reader is not None,
            "sends_increments": True,
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(front: ReadyFront) -> Response:
    """Shows the options, the model and the engine's counters, but no key, no address and no path of this machine.

    An option that was left out shows what the engine chose, because clients of SGLang compute with `page_size`. With
    several engines `internal_states` has one entry for each, with its number and its state.
    """
    knobs: dict[str, Any] = dataclasses.asdict(front.server_config) | dataclasses.asdict(front.engine_config)
    info = _model_info(front)
    chosen = {name: info[name] for name, value in knobs.items() if value is None and name in info}
    shown = {name: value for name, value in (knobs | chosen).items() if name not in HIDDEN_KNOBS} | _names(front)
    if (published := published_at(front.server_config)) is not None:
        shown["kv_events"] = published | {"block_size": block_tokens_of(front.client.info.page_size)}
    state = {"version": jsg.__version__, "model_info": info}
    return json_response(shown | state | {"internal_states": await _internal_states(front)})


@router.get("/get_load")
async def load(front: ReadyFront) -> Response:
    """Shows the load of each engine, for routers: its requests, those that wait and for what, and its tokens in use."""
    return json_response(
        [
            {
                "dp_rank": number,
                "num_reqs": stats["num_running"] + stats["num_waiting"],
                "num_waiting_reqs": stats["num_waiting"],
                "waiting": {reason.value: count for reason in WaitReason if (count := stats.get(stat_of(reason), 0))},
                "num_tokens": stats["num_protected_tokens"] + stats["num_uncached_tokens"],
            }
            for number, stats in (await _stats(front)).items()
        ]
    )


@router.get("/get_weight_version")
async def weight_version() -> Response:
    """Always answers "default", because weights are loaded once and never changed."""
    return json_response({"weight_version": WEIGHT_VERSION, "success": True})


@router.get("/version")
async def version() -> Response:
    """Gives the version of jsg."""
    return json_response({"version": jsg.__version__})


async def answer_in_time[T](front: Front, call: Awaitable[T]) -> T:
    """The engine's answer, if it comes within `--health-timeout`: an engine that stands still must not hold clients up.

    Raises:
        TimeLimitError: The engine did not answer in time.
        JsgError: What the call raises.
    """
    timeout_s = front.server_config.health_timeout
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise TimeLimitError(
            f"the engine must answer within {timeout_s:g} s (--health-timeout), but did not; see /health for its state"
        ) from None


async def _stats(front: Front) -> dict[int, dict[str, int | float]]:
    """The counters of each engine that works, by its number. Raises EngineDeadError where none lives."""
    engines = front.client.engines
    if len(engines) == 1:
        return {0: await answer_in_time(front, engines[0].stats())}

    async def ask(number: int) -> tuple[int, dict[str, int | float] | None]:
        try:
            return number, await engines[number].stats()
        except EngineDeadError:
            return number, None

    able = [number for number, engine in enumerate(engines) if state_of(engine) == "ok"]
    told = await answer_in_time(front, asyncio.gather(*map(ask, able)))
    found = {number: stats for number, stats in told if stats is not None}
    if not found:
        raise EngineDeadError("no engine process answers; see /health and the server's log")
    return found


async def _internal_states(front: Front) -> list[dict[str, Any]]:
    """The counters of the engine. Of several engines, one that does not answer has its number and state only."""
    engines, told = front.client.engines, await _stats(front)
    if len(engines) == 1:
        return [*told.values()]
    return [{"engine": i, "state": state_of(engine), **told.get(i, {})} for i, engine in enumerate(engines)]


def _model_info(front: Front) -> dict[str, Any]:
    modalities = front.media.modalities
    shown = {"is_multimodal": len(modalities) > 1, "modalities": modalities}
    return dataclasses.asdict(front.generator.info) | shown | _names(front)


def _names(front: Front) -> dict[str, str]:
    """The names of the model and the tokenizer, which do not tell where the files are."""
    config = front.engine_config
    return {
        "model_path": public_name(config.model_path),
        "tokenizer_path": public_name(config.tokenizer_path or config.model_path),
    }
