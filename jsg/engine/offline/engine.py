"""`jsg.Engine`: a model in this process, from text to text."""

import asyncio
import dataclasses
import itertools
import queue
import random
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from jsg.config import EngineConfig
from jsg.constrained.special_tokens import check_names
from jsg.constrained.stop_patterns import stop_patterns
from jsg.engine.child.protocol import ModelInfo, Progress
from jsg.engine.core import EngineCore
from jsg.engine.find import find_model
from jsg.engine.media_reader import ModelMediaReader
from jsg.engine.offline.driver import Driver
from jsg.engine.offline.grammars import OfflineGrammars, Tables
from jsg.engine.offline.lang_backend import EngineBackend, EngineModel
from jsg.engine.offline.media import Media, with_media
from jsg.engine.selfcheck import SelfCheck
from jsg.errors import ConfigError, JsgError, RequestError, near
from jsg.processing.media_prompt import MediaReader
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.processing.vectors import check_dimensions, to_vector, whole
from jsg.sources import find_tokenizer
from jsg.speech.answers.answer import Answer, Prompt, asked, with_common_point
from jsg.speech.answers.tool_calls import nameable_tokens
from jsg.types import FinishType, GrammarSpec, Request, RequestOutput, SamplingParams

Result = dict[str, Any]
"""`text`, `output_ids` and `meta_info`, as SGLang's `/generate` returns them."""
SamplingFields = dict[str, Any] | SamplingParams | None
Texts = str | Sequence[str] | None
TokenIds = Sequence[int] | Sequence[Sequence[int]] | None
_Item = tuple[int, RequestOutput | JsgError]
REPORT_FIELDS = (
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("namespace", "priority", "return_cache_info", "return_waited"),
)
"""Arguments of `generate` that go into the request."""


class Engine:
    """A model that answers in this process. Requests of all threads and tasks share its batches and its cache.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, model_path: str = "tiny", *, report: Callable[[Progress], None] | None = None, **knobs: Any
    ) -> None:
        """Loads the model and compiles its programs.

        Args:
            model_path: Directory, hub name, or a model inside the package: "tiny", or "tiny-vision", which sees.
            report: Called with the progress of the start.
            **knobs: Fields of `jsg.config.EngineConfig`.

        Raises:
            JsgError: An option is unknown or wrong, or the model or the memory do not allow it.
        """
        config = _make_config(model_path, knobs)
        directory = find_model(config)
        tokenizer_path = config.tokenizer_path
        self.tokenizer: Tokenizer = load_tokenizer(find_tokenizer(tokenizer_path, directory))
        self.media: MediaReader | None = ModelMediaReader.of_model(directory, self.tokenizer)
        core = EngineCore(config, report=report)
        self.info: ModelInfo = core.info
        self._names = {"model_path": config.model_path, "tokenizer_path": tokenizer_path or config.model_path}
        nameable = nameable_tokens(self.tokenizer, core.info.vocab_size, core.info.eos_token_ids)
        self._nameable = frozenset(nameable.values())
        self._driver = Driver(core)
        self._seeds = random.Random(config.random_seed)
        self._numbers = itertools.count()
        self._grammars = OfflineGrammars(self._driver)
        model = EngineModel(self.tokenizer, self.media, self.answer_async, self.hold)
        self._backend = EngineBackend(model, self.flush_cache, self.get_server_info)
        # Python must not end while the compile thread of an open engine runs.
        self._at_exit = weakref.finalize(self, Driver.close, self._driver)

    def generate(
        self,
        prompt: Texts = None,
        sampling_params: SamplingFields | Sequence[SamplingFields] = None,
        *,
        input_ids: TokenIds = None,
        image_data: Media = None,
        video_data: Media = None,
        num_frames: int | None = None,
        stream: bool = False,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] = (),
        return_text_in_logprobs: bool = False,
        namespace: str = "",
        priority: int = 0,
        return_cache_info: bool = False,
        return_waited: bool = False,
        turn_end: int = 0,
    ) -> Any:
        """Continues one prompt or several.

        Args:
            prompt: A text or a list of texts; special tokens in them count as such.
            sampling_params: `SamplingParams` or what its `from_dict` takes, grammars too; a list has one for each
                prompt.
            input_ids: Token ids in place of texts: a list, or a list of lists.
            image_data: Pictures of one prompt, for a model that takes images: a path, bytes, a `data:` URL or a picture
                of PIL, or a list of those. For a list of prompts, a list with such a list, a picture or None for each.
                They take the place of the model's placeholders in the prompt, or its front where it has none.
            video_data: Videos, given the same way. A tuple of pictures is a video with those frames.
            num_frames: How many frames of each video are shown, at even distances. None shows 8 frames of a file, and
                all frames of a tuple.
            stream: Return an iterator over the results so far instead.
            return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob, namespace, priority,
                return_cache_info, return_waited, turn_end: As in `types.Request`. Without `return_logprob` the other
                log-probabilities ask for nothing. With `max_new_tokens` 0 the alternatives are for the next token.
            return_text_in_logprobs: Report the text of each scored token too.

        Returns:
            A result for one prompt, and a list for a list of prompts or n > 1. With `stream`, an iterator over results
            that grow; if there are several, each has its `index`.

        Raises:
            RequestError: A field breaks a rule. As GrammarError: a grammar is wrong or not supported.
            JsgError: The engine failed.
        """
        answers, is_list = self._answers(
            prompt, sampling_params, input_ids, image_data, video_data, num_frames,
            return_logprob=return_logprob, logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num, token_ids_logprob=token_ids_logprob, namespace=namespace,
            priority=priority, return_cache_info=return_cache_info, return_waited=return_waited,
            turn_end=turn_end,
        )  # fmt: skip
        tables = self._grammars.tables(self._grammars_of(answers))
        texts = self.tokenizer if return_text_in_logprobs else None
        if stream:
            return self._stream(answers, tables, texts, is_list)
        for _ in self._run(answers, tables, is_read=False):
            pass
        results = [answer.result(texts) for answer in answers]
        return results if is_list else results[0]

    async def async_generate(
        self,
        prompt: Texts = None,
        sampling_params: SamplingFields | Sequence[SamplingFields] = None,
        *,
        input_ids: TokenIds = None,
        image_data: Media = None,
        video_data: Media = None,
        num_frames: int | None = None,
        stream: bool = False,
        return_text_in_logprobs: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio, with the same `fields`; with `stream` it returns an asynchronous iterator.

        Cancelling it aborts its requests.
        """
        if unknown := sorted(set(fields) - set(REPORT_FIELDS)):
            raise TypeError(f"async_generate() got an unexpected keyword argument {unknown[0]!r}")
        given = (prompt, sampling_params, input_ids, image_data, video_data, num_frames)
        # Decoding pictures takes long and must not stop the event loop.
        is_long = image_data is not None or video_data is not None
        answers, is_list = (
            await asyncio.to_thread(self._answers, *given, **fields) if is_long else self._answers(*given, **fields)
        )
        tables = await self._tables_of(answers)
        texts = self.tokenizer if return_text_in_logprobs else None
        if stream:
            return self._stream_async(answers, tables, texts, is_list)
        async for _ in self._run_async(answers, tables, is_read=False):
            pass
        results = [answer.result(texts) for answer in answers]
        return results if is_list else results[0]

    def encode(self, prompt: Texts = None, *, input_ids: TokenIds = None, dimensions: int | None = None) -> Any:
        """Embeds one text or several, with a model that embeds.

        Args:
            prompt, input_ids: As in `generate`.
            dimensions: The length of the vectors, where the model's may be cut.

        Returns:
            A dictionary with `embedding`, a list of floats, and `meta_info` for one text, and a list for a list.

        Raises:
            RequestError: A field breaks a rule, or the model generates text.
            JsgError: The engine failed.
        """
        embedder = self.info.embedder
        if embedder is None:
            raise RequestError("encode needs a model that embeds, but this one generates text", param="model")
        check_dimensions(embedder, dimensions)
        sampling = SamplingParams(max_new_tokens=1, temperature=0)
        answers, is_list = self._answers(prompt, sampling, input_ids, only_scores_next=True, embed=True)
        for _ in self._run(answers, {}, is_read=False):
            pass
        results = [
            {
                "embedding": to_vector(state, embedder, dimensions).tolist(),
                "meta_info": answer.result()["meta_info"],
            }
            for answer, state in zip(answers, whole([answer.vector for answer in answers]), strict=True)
        ]
        return results if is_list else results[0]

    def as_backend(self) -> EngineBackend:
        """This engine as the backend of programs; always the same object."""
        return self._backend

    async def answer_async(self, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[list[Answer], int, str]]:
        """Runs prompts together; yields all answers, the index of the one that has grown, and its new text.

        Closing it early aborts them.

        Raises:
            JsgError: A prompt breaks a rule, or the engine failed.
        """
        answers = self._answers_of(prompts)
        tables = await self._tables_of(answers)
        moves = self._run_async(answers, tables)
        try:
            async for index, text in moves:
                yield answers, index, text
        finally:
            await moves.aclose()

    def hold(self, prompt: Prompt, heard: Callable[[], None]) -> Callable[[], None]:
        """Submits a prompt whose `hold` is set; returns a function that ends the hold.

        The engine's thread calls `heard` when the prompt is cached, and when the hold ends by itself, as it does where
        the engine refuses it.

        Raises:
            JsgError: The prompt breaks a rule, or the engine was closed.
        """
        (request,) = prompt.requests(0)
        self._driver.submit(request, lambda _: heard())
        return lambda: self._driver.abort(request.rid)

    @property
    def model_info(self) -> dict[str, Any]:
        """The names of the model and the tokenizer as they were given, and the sizes of the model."""
        return dataclasses.asdict(self.info) | self._names

    def get_server_info(self) -> dict[str, Any]:
        """Gives `model_info` and the counters, which are also where a server has them: in `internal_states`."""
        stats: dict[str, Any] = self._driver.call(EngineCore.stats)
        return self.model_info | stats | {"internal_states": [stats]}

    def selfcheck(self, budget_s: float = 20.0) -> SelfCheck:
        """Times decode steps and the best that the device can do. Raises JsgError while requests run."""
        return self._driver.call(lambda core: core.selfcheck(budget_s))

    def flush_cache(self) -> bool:
        """Forgets every cached prefix; False, and no change, while requests run."""
        return self._driver.call(EngineCore.flush_cache)

    def close(self) -> None:
        """Ends the engine. Requests that still run get an error. A second call does nothing."""
        self._at_exit()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Requests.

    def _answers(
        self,
        prompt: Texts,
        sampling_params: SamplingFields | Sequence[SamplingFields],
        input_ids: TokenIds,
        image_data: Media = None,
        video_data: Media = None,
        num_frames: int | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] = (),
        **fields: Any,
    ) -> tuple[list[Answer], bool]:
        id_lists, is_list = self._token_lists(prompt, input_ids)
        samplings = _one_each(sampling_params, len(id_lists))
        prompts = with_media(
            id_lists,
            image_data,
            video_data,
            num_frames=num_frames,
            is_list=is_list,
            reader=self.media,
            max_tokens=self.info.max_request_tokens,
            bos_ids=self.tokenizer.bos_ids,
        )
        made = [
            Prompt(
                rid=f"offline-{next(self._numbers)}",
                **(encoded.fields | fields),
                **asked(
                    sampling,
                    self.info.max_request_tokens - len(encoded.input_ids),
                    return_logprob=return_logprob,
                    logprob_start_len=logprob_start_len,
                    top_logprobs_num=top_logprobs_num,
                    token_ids_logprob=token_ids_logprob,
                ),
            )
            for encoded, sampling in zip(prompts, samplings, strict=True)
        ]
        answers = self._answers_of(made)
        return answers, is_list or len(answers) > 1

    def _answers_of(self, prompts: Sequence[Prompt]) -> list[Answer]:
        answers: list[Answer] = []
        for prompt in with_common_point(prompts) if self.info.caches_states else prompts:
            prompt.check_task(self.info.embedder)
            seed, patterns = self._seeds.getrandbits(63), stop_patterns(prompt.sampling)
            answers += prompt.answers(self.tokenizer, seed, self.info.vocab_size, patterns)
        return answers

    def _token_lists(self, prompt: Texts, input_ids: TokenIds) -> tuple[list[tuple[int, ...]], bool]:
        if (prompt is None) == (input_ids is None):
            raise RequestError("exactly one of prompt and input_ids must be given", param="prompt")
        if isinstance(prompt, str):
            return [tuple(self.tokenizer.encode(prompt))], False
        if prompt is not None:
            return [tuple(self.tokenizer.encode(text)) for text in prompt], True
        assert input_ids is not None
        if not input_ids or isinstance(input_ids[0], int):
            return [tuple(input_ids)], False  # pyright: ignore[reportReturnType]
        return [tuple(ids) for ids in input_ids], True  # pyright: ignore[reportArgumentType]

    def _grammars_of(self, answers: list[Answer]) -> list[GrammarSpec]:
        """The grammars of these answers, each once.

        Raises:
            GrammarError: One names a special token that the model does not have.
        """
        named = dict.fromkeys(answer.request.sampling.grammar for answer in answers)
        grammars = [grammar for grammar in named if isinstance(grammar, GrammarSpec)]
        for grammar in grammars:
            check_names(grammar, self._nameable)
        return grammars

    async def _tables_of(self, answers: list[Answer]) -> Tables:
        grammars = self._grammars_of(answers)
        tables = self._grammars.kept(grammars)
        if tables is None:  # compiling may take seconds and must not stop the event loop
            tables = await asyncio.to_thread(self._grammars.tables, grammars)
        return tables

    def _run(self, answers: list[Answer], tables: Tables, *, is_read: bool = True) -> Iterator[tuple[int, str]]:
        """Runs all answers to their ends; yields the index and the new text of each that has grown.

        Closing it early aborts them.
        """
        arrived: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        try:
            for index, answer in enumerate(answers):
                self._grammars.submit(
                    _request_of(answer, is_read=is_read), tables, lambda item, index=index: arrived.put((index, item))
                )
            num_open = len(answers)
            while num_open:
                index, item = arrived.get()
                if (text := self._take(answers[index], item)) is not None:
                    num_open -= answers[index].finish is not None
                    yield index, text
        finally:
            self._abort_unfinished(answers)

    async def _run_async(
        self, answers: list[Answer], tables: Tables, *, is_read: bool = True
    ) -> AsyncGenerator[tuple[int, str]]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[_Item] = asyncio.Queue()

        def sink_of(index: int) -> Callable[[RequestOutput | JsgError], None]:
            return lambda item: loop.call_soon_threadsafe(arrived.put_nowait, (index, item)) and None

        try:
            for index, answer in enumerate(answers):
                self._grammars.submit(_request_of(answer, is_read=is_read), tables, sink_of(index))
            num_open = len(answers)
            while num_open:
                index, item = await arrived.get()
                if (text := self._take(answers[index], item)) is not None:
                    num_open -= answers[index].finish is not None
                    yield index, text
        finally:
            self._abort_unfinished(answers)

    def _take(self, answer: Answer, item: RequestOutput | JsgError) -> str | None:
        """Adds an output to its answer, and gives the new text.

        None where the answer has ended at a stop string, which the engine cannot see.
        """
        if isinstance(item, JsgError):
            raise item
        if answer.finish is not None:
            return None
        delta = answer.push(item)
        if delta.finish is not None and item.finish is None:
            self._driver.abort(answer.request.rid)
        if delta.finish is not None and delta.finish.type is FinishType.ERROR:
            raise delta.finish.to_error()
        return delta.text

    def _abort_unfinished(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.finish is None:
                self._driver.abort(answer.request.rid)

    def _stream(
        self, answers: list[Answer], tables: Tables, texts: Tokenizer | None, is_list: bool
    ) -> Iterator[Result]:
        for index, _ in self._run(answers, tables):
            yield answers[index].result(texts) | ({"index": index} if is_list else {})

    async def _stream_async(
        self, answers: list[Answer], tables: Tables, texts: Tokenizer | None, is_list: bool
    ) -> AsyncIterator[Result]:
        async for index, _ in self._run_async(answers, tables):
            yield answers[index].result(texts) | ({"index": index} if is_list else {})


def _request_of(answer: Answer, *, is_read: bool) -> Request:
    is_streamed = is_read or not answer.ends_in_engine
    return answer.request if is_streamed else dataclasses.replace(answer.request, is_streamed=False)


def _make_config(model_path: str, knobs: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    if knobs.pop("dp_size", 1) != 1:
        raise ConfigError("dp_size needs several processes; use `jsg serve --dp-size`, or an Engine in each process")
    if unknown := sorted(set(knobs) - set(known)):
        raise ConfigError(
            f"unknown engine option {unknown[0]!r}{near(unknown[0], known)}; known are {', '.join(known)}"
        )
    config = EngineConfig(model_path=model_path, **knobs)
    if config.nnodes > 1:
        raise ConfigError(
            f"--nnodes must be 1 in an engine of one process, but got {config.nnodes}; several hosts share a model "
            "under 'jsg serve' only"
        )
    return config


def _one_each(given: SamplingFields | Sequence[SamplingFields], count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, dict | SamplingParams):
        return [_sampling(given)] * count
    if len(given) != count:
        raise RequestError(f"sampling_params must have one item for each of {count} prompts, but has {len(given)}")
    return [_sampling(each) for each in given]


def _sampling(given: SamplingFields) -> SamplingParams:
    sampling = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if isinstance(sampling.grammar, str):  # a key, which names a grammar between processes only
        raise RequestError("grammar must be a GrammarSpec, but got text; write GrammarSpec('regex', ...)", "grammar")
    return sampling
