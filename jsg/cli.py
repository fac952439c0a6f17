"""The command line: `jsg serve`, `jsg generate`, `jsg chat`, `jsg check`, `jsg compile`, `jsg convert`, `jsg grammar`.

Options are the fields of `jsg.config`; the file of `--config` may give them too. No slow module is imported before the
command is known. `serve` starts the engine process first and loads its own modules meanwhile. The other commands run
the engine in this process.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import logging
import os
import pathlib
import select
import signal
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from typing import Any, override

import jsg
from jsg.config import (
    LOAD_FORMATS,
    LOG_FORMAT_HELP,
    LOG_FORMATS,
    EngineConfig,
    ServerConfig,
    number_or_auto,
    option,
    value_type,
)
from jsg.engine.child.log import ServerLog
from jsg.engine.child.parent import end_with_parent
from jsg.errors import ConfigError, JsgError, RequestError, check_length
from jsg.grammar_command import add_grammar_command, run_grammar_command, text_to_read
from jsg.option_sources import environment_keys, near_options, read_options
from jsg.types import SamplingParams

logger = logging.getLogger("jsg")

type Engine = Any  # `jsg.engine.offline.engine.Engine`, which imports JAX

CHECK_FAILED, FAILED, INTERRUPTED = 1, 2, 130

CHECK_PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
CHECK_NEW_TOKENS = 32
MAX_LOGPROB_CHANGE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
"""The change of a log-probability that rounding explains. In default mode, tokens may differ only at a tie: where the
log-probabilities of two tokens differ by less than twice this. The values of 16 bits were not measured on a GPU."""
TARGETS = tuple(sorted(file.stem for file in pathlib.Path(__file__).parent.glob("engine/device/targets/*")))
CONFIG_HELP = (
    "A YAML file with options of 'jsg serve', such as 'page-size: 16'. What the command line gives too is taken from "
    "there. Other commands leave out the options of the server."
)
PASTE_GAP_S = 0.05  # lines that come faster than anybody types are one message


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, or 1 for a check that failed, 2 for an error, or 130 after Ctrl-C."""
    started_at = time.monotonic()
    options = command_line().parse_args(arguments)
    if options.command in ("serve", "compile"):
        return _run_logged(options, started_at)
    logging.basicConfig(level=logging.WARNING, format="jsg: %(levelname)s: %(message)s")
    try:
        if options.command == "grammar":
            return run_grammar_command(options)
        if options.command == "convert":
            return _convert(options)
        _add_from_elsewhere(options)
        config = _engine_config(options)
        match options.command:
            case "generate":
                return _generate(config, options)
            case "chat":
                return _chat(config)
            case _:
                return _check(config, options)
    except JsgError as error:
        red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
        print(f"{red}jsg: error: {error}{plain}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run_logged(options: argparse.Namespace, started_at: float) -> int:
    """Runs a command whose stderr is a log. Returns as `main` does."""
    wrong: ConfigError | None = None
    try:
        _add_from_elsewhere(options)
    except ConfigError as error:  # it belongs into the log too, in the format that the arguments ask for
        wrong = error
    rank = getattr(options, "node_rank", 0)
    source = "compile" if options.command == "compile" else f"follower-{rank}" if rank else "front"
    log = ServerLog(str(getattr(options, "log_format", "text")), source)
    try:
        if wrong is not None:
            raise wrong
        config = _engine_config(options)
        if options.command == "compile":
            return _compile(config, pathlib.Path(options.out), options.target, log)
        return _serve(config, ServerConfig(**_given(options, ServerConfig)), started_at, log)
    except JsgError as error:
        logger.error("%s", error)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Refuses what it does not know itself, with the usage of its own command and the nearest names of options."""

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] # of overloads
        given = sys.argv[1:] if args is None else list(args)
        own = given  # before its command, if it has commands
        if self._subparsers is not None:
            own = list(itertools.takewhile(lambda word: word.startswith("-"), given))
        for word in itertools.takewhile(lambda word: word != "--", own):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                self._refuse(name)  # else argparse would first say what else is missing
        found, rest = super().parse_known_args(given, namespace)
        for name in rest:
            self._refuse(name)
        return found, rest

    def _refuse(self, name: str) -> typing.NoReturn:
        known = self._option_string_actions if name.startswith("-") else ()
        kind, shown = "option" if name.startswith("-") else "argument", name[:80]
        self.error(f"there is no {kind} {shown!r}; {near_options(name, known)}{self.prog} --help lists all")


def command_line() -> argparse.ArgumentParser:
    """The parser of every command. Options of the configuration that are not given are not in its namespace."""
    parser = _Parser(prog="jsg", description="A JAX/XLA serving stack for language-model programs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jsg {jsg.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add_command(name: str, text: str, needed: str = "") -> argparse.ArgumentParser:
        usage = f"%(prog)s [-h] [MODEL] {needed}[OPTION ...]"
        command = commands.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        command.add_argument("model", nargs="?", metavar="MODEL", help="the model; the same as --model-path")
        command.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        _add_options(command, EngineConfig)
        return command

    _add_options(add_command("serve", "serve a model over HTTP"), ServerConfig)
    generate = add_command("generate", "continue one prompt", "--prompt TEXT ")
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue; - reads it from stdin")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="the most tokens to generate")
    generate.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token")
    generate.add_argument("--json", action="store_true", help="print an object with text, output_ids and meta_info")
    add_command("chat", "talk to a model in the terminal")
    check = add_command("check", "show device and memory, check that a cached prefix changes no answer, time a step")
    check.add_argument("--dry-run", action="store_true", help="say from config.json alone what fits on which card")
    check.add_argument("--json", action="store_true", help="with --dry-run: print the same as an object")
    precompile = add_command(
        "compile", "compile all programs of a model, so that a start with --programs compiles none", "--out DIR "
    )
    precompile.add_argument("--out", required=True, metavar="DIR", help="the folder to make; it must not exist yet")
    precompile.add_argument(
        "--target",
        default="",
        metavar="TARGETS",
        help="NVIDIA cards and TPUs, separated by commas, for which to compile without having one, each in a folder of "
        f"its name in DIR: {', '.join(TARGETS)} (default: this machine's device, in DIR itself)",
    )
    precompile.add_argument("--log-format", default=argparse.SUPPRESS, choices=LOG_FORMATS, help=LOG_FORMAT_HELP)
    _add_convert_command(commands)
    add_grammar_command(commands)
    return parser


def _add_convert_command(commands: Any) -> None:
    text = "write a model with its weights in chunks for a number of devices, or with kernels in 8 or 4 bits"
    command = commands.add_parser("convert", help=text, description=text, allow_abbrev=False)
    command.add_argument("source", metavar="SRC", help="a model directory or a hub name, as --model-path takes it")
    command.add_argument("destination", metavar="DST", help="the model directory to make; it must not exist yet")
    rounding = "round kernels, and write safetensors in the form of compressed-tensors instead of orbax (default: none)"
    command.add_argument("--quantization", choices=["none", "int8", "fp8", "int4"], default="none", help=rounding)
    chunks = "the number of devices for which chunks are made; any other number can load them too (default: 1)"
    command.add_argument("--tp-size", type=int, default=1, metavar="N", help=chunks)
    command.add_argument(
        "--load-format",
        choices=[name for name in LOAD_FORMATS if name != "dummy"],
        default="auto",
        help="the kind of weight files in SRC to read; 'auto' reads the kind that SRC has (default: auto)",
    )


def _add_options(parser: argparse.ArgumentParser, config: type[EngineConfig | ServerConfig]) -> None:
    """Adds an option for each field. An option that is not given is not in the namespace: the field has its default."""
    annotations = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind, text, choices = value_type(annotations[field.name]), field.metadata["help"], field.metadata["choices"]
        how: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if kind is tuple:
            how |= {"action": "append", "metavar": "STR"}
        elif kind is bool:
            how |= {"action": "store_true"}
        else:
            text += "" if field.default is None else f" Default: {field.default}."
            usual = number_or_auto if kind is int and field.default is None else kind
            how |= {"type": field.metadata["read"] or usual}
            how |= {"choices": choices} if choices else {"metavar": kind.__name__.upper()}
        parser.add_argument(*map(option, (field.name, *field.metadata["aliases"])), help=text, **how)


def _add_from_elsewhere(options: argparse.Namespace) -> None:
    """Adds the options of the file of `--config` and a server's keys in the environment, which the arguments lack."""
    found: dict[str, Any] = environment_keys(os.environ) if options.command == "serve" else {}
    if options.config is not None:
        found |= read_options(pathlib.Path(options.config))
    if options.model is not None:
        found.pop("model_path", None)
    if options.command == "compile":
        found.pop("programs", None)  # the file is that of the start which will read them
    for name in found.keys() - vars(options).keys():
        setattr(options, name, found[name])


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    given = _given(options, EngineConfig)
    if options.model is not None:
        if "model_path" in given:
            raise ConfigError("MODEL and --model-path are the same, but both are given; leave one out")
        given["model_path"] = options.model
    return EngineConfig(**given)


def _given(options: argparse.Namespace, config: type[EngineConfig | ServerConfig]) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(config) if field.name in options}


def _serve(engine: EngineConfig, server: ServerConfig, started_at: float, log: ServerLog) -> int:
    if server.dp_size > 1 and engine.nnodes > 1:
        raise ConfigError(
            f"--dp-size must be 1 if --nnodes is above 1, but got {server.dp_size}: several engines share one machine; "
            "start a server for each group of hosts"
        )
    if server.kv_events_endpoint is not None and engine.disable_radix_cache:
        raise ConfigError("--kv-events-endpoint tells of the cache that --disable-radix-cache turns off; leave one out")
    if server.exit_with_parent:
        end_with_parent()
    if engine.node_rank > 0:
        return _follow(engine, log)
    # Until the server listens to signals itself. Python's own end removes the directories of sockets, and the children
    # end with their parent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    from jsg.engine.find import find_model
    from jsg.engine.front.children import EngineChild
    from jsg.engine.front.gpus import device_groups, engine_configs
    from jsg.engine.front.kv_addresses import kv_events_of
    from jsg.sources import find_tokenizer

    model_dir = find_model(engine)
    tokenizer_dir = find_tokenizer(engine.tokenizer_path, model_dir)
    config = dataclasses.replace(engine, model_path=str(model_dir))
    groups = device_groups(server.dp_size, engine.tp_size)
    configs = engine_configs(config, groups)
    children = [
        EngineChild.spawn(
            own, environment=group, kv_events=events, name=f"engine-{number}" if len(groups) > 1 else "engine"
        )
        for number, (own, group, events) in enumerate(zip(configs, groups, kv_events_of(server), strict=True))
    ]
    # While the children load, the front imports what it needs itself.
    import asyncio

    from jsg.server.run import serve_to_end

    directories = {"tokenizer_dir": tokenizer_dir, "model_dir": model_dir}
    return asyncio.run(serve_to_end(engine, server, children, **directories, started_at=started_at, log=log))


def _follow(config: EngineConfig, log: ServerLog) -> int:
    """Works as one of several hosts until the leader ends. Ctrl-C and SIGTERM end it at once; the leader notices."""
    from jsg.engine.startup import follow
    from jsg.server.progress import StartDisplay

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with StartDisplay(log) as display:
        follow(config, display.show)
    return 0


@contextlib.contextmanager
def _running_engine(config: EngineConfig) -> Iterator[Engine]:
    """Runs an engine in this process and shows the progress of its start on stderr."""
    from jsg.engine.offline.engine import Engine
    from jsg.server.progress import StartDisplay

    with StartDisplay() as display:
        engine = Engine(**dataclasses.asdict(config), report=display.show)
    try:
        yield engine
    finally:
        engine.close()


def _generate(config: EngineConfig, options: argparse.Namespace) -> int:
    prompt = text_to_read("--prompt", options.prompt) or ""
    sampling = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    _check_prompt(config, prompt, SamplingParams.from_dict(sampling))
    with _running_engine(config) as engine:
        answer = engine.generate(prompt=prompt, sampling_params=sampling)
    print(json.dumps(answer, ensure_ascii=False) if options.json else answer["text"])
    return 0


def _check_prompt(config: EngineConfig, prompt: str, sampling: SamplingParams) -> None:
    """Refuses what an engine would refuse, before one is loaded, as far as the files of the model tell."""
    from jsg.engine.embedder import read_embedder
    from jsg.engine.find import find_model
    from jsg.models.config import read_spec
    from jsg.processing.tokenizer import load_tokenizer
    from jsg.sources import find_tokenizer
    from jsg.speech.answers.answer import Prompt

    directory = find_model(config)
    model = read_spec(directory)
    tokenizer = load_tokenizer(find_tokenizer(config.tokenizer_path, directory))
    made = Prompt(rid="judged", input_ids=tuple(tokenizer.encode(prompt)), sampling=sampling)
    made.check_task(read_embedder(directory, config.task, model))
    made.requests(0)
    limit = config.context_length or model.max_position_embeddings
    check_length(len(made.input_ids), sampling.max_new_tokens, limit)


def _chat(config: EngineConfig) -> int:
    """Ctrl-C ends an answer, Ctrl-D the chat. The conversation keeps the part of an answer before Ctrl-C."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # line editing and history for `input`
    from jsg.speech.prompts.chat_prompt import ChatPrompt

    messages: list[dict[str, str]] = []
    with _running_engine(config) as engine:
        chat_prompt = ChatPrompt(engine.tokenizer, media=engine.media, caches_states=engine.info.caches_states)
        print("Ctrl-C ends an answer, Ctrl-D the chat.", file=sys.stderr)
        while (said := _read_message()) is not None:
            question = {"role": "user", "content": said}
            try:
                prompt = chat_prompt.prompt([*messages, question])
                text = _print_answer(engine, list(prompt.input_ids), prompt.turn_end)
            except RequestError as error:
                print(f"jsg: {error}", file=sys.stderr)  # the conversation goes on without this question
                continue
            messages += [question, {"role": "assistant", "content": text}]
    return 0


def _print_answer(engine: Engine, input_ids: list[int], turn_end: int) -> str:
    """Prints an answer as it comes and returns it; Ctrl-C ends it."""
    sampling = {"max_new_tokens": max(1, engine.info.max_request_tokens - len(input_ids))}
    answers = engine.generate(input_ids=input_ids, sampling_params=sampling, stream=True, turn_end=turn_end)
    text = ""
    with contextlib.closing(answers), contextlib.suppress(KeyboardInterrupt):
        for answer in answers:
            shown = answer["text"]
            if engine.tokenizer.strips_leading_space:  # the engine continues a text; after a template a new one begins
                shown = shown.removeprefix(" ")
            print(shown[len(text) :], end="", flush=True)
            text = shown
    print()
    return text


def _read_message() -> str | None:
    """What the user types, or pastes in several lines; None at the end of the input."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            lines = [input("> " if is_terminal else "")]
            while is_terminal and select.select([sys.stdin], [], [], PASTE_GAP_S)[0]:
                lines.append(input())
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()  # as a shell does: drop the line and ask again
        else:
            return "\n".join(lines)


def _compile(config: EngineConfig, directory: pathlib.Path, target: str, log: ServerLog) -> int:
    """Compiles for this machine's device, or for each of these targets."""
    names = [name.strip() for name in target.split(",") if name.strip()]
    if wrong := sorted(set(names).difference(TARGETS)):
        raise ConfigError(f"--target must name some of {', '.join(TARGETS)}, but got {', '.join(wrong)}; correct it")
    if config.programs is not None:
        raise ConfigError("--programs is for a start, but 'jsg compile' makes them anew; leave it out")
    if config.nnodes > 1:
        raise ConfigError("'jsg compile' compiles for one host, but --nnodes is above 1; leave it out")
    if names:  # before JAX starts: there is no driver that the plugin for CUDA could ask
        os.environ["JAX_PLATFORMS"], os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "cpu", "1"
    from jsg.engine.precompile import precompile
    from jsg.server.progress import StartDisplay

    for name in names or [""]:
        with StartDisplay(log) as display:
            precompile(config, directory / name, display.show, name or None)
    return 0


def _convert(options: argparse.Namespace) -> int:
    """Writes the checkpoint. Shows a bar on a terminal, and a line for each tenth elsewhere."""
    from jsg.conversion.convert import check_destination, convert, use_host
    from jsg.engine.find import find_model
    from jsg.server.progress import ByteDisplay

    use_host()
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, _: sys.exit(128 + number))  # the bar gives the terminal back
    destination = pathlib.Path(options.destination)
    form = {name: getattr(options, name) for name in ("quantization", "tp_size", "load_format")}
    config = EngineConfig(model_path=options.source, task="generate", **form)
    check_destination(destination)
    with ByteDisplay("convert") as display:
        convert(find_model(config), destination, progress=display.show, **form)
    return 0


def _check(config: EngineConfig, options: argparse.Namespace) -> int:
    """Compares the answer with an empty cache and the answer with a full one, and times the step."""
    if options.dry_run:
        from jsg.engine.dry_run import dry_run

        report = dry_run(config)
        print(json.dumps(report.as_json(), ensure_ascii=False) if options.json else report)
        return CHECK_FAILED if report.problems else 0
    if options.json:
        raise ConfigError("--json needs --dry-run, but got --json alone; add --dry-run, or leave --json out")
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("jax", "jaxlib", "flax", "numpy", "tokenizers")]
    print("versions:", ", ".join([f"jsg {jsg.__version__}", *versions]))
    with _running_engine(config) as engine:
        print(f"device:   {engine.info.device}, {engine.info.dtype}")
        print(f"model:    {engine.info.model_path}, context of {engine.info.context_length} tokens")
        print(f"KV pool:  {engine.info.max_total_tokens} tokens; {engine.info.max_running_requests} requests at once")
        engine.flush_cache()
        cold, warm = (_greedy_answer(engine) for _ in range(2))
        selfcheck = engine.selfcheck()
    problem = find_difference(cold, warm, MAX_LOGPROB_CHANGE[engine.info.dtype])
    cached_tokens = warm["meta_info"]["cached_tokens"]
    if problem is None and cached_tokens == 0 and engine.info.caches_prefixes:
        problem = "the second answer took nothing from the cache"
    print(f"cached:   {cached_tokens} of {warm['meta_info']['prompt_tokens']} prompt tokens the second time")
    print(f"cold = warm: {'yes' if problem is None else f'NO: {problem}'}")
    print(f"\n{selfcheck}")
    return 0 if problem is None else CHECK_FAILED


def _greedy_answer(engine: Engine) -> dict[str, Any]:
    sampling = {"max_new_tokens": CHECK_NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return engine.generate(prompt=CHECK_PROMPT, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)


def find_difference(cold: dict[str, Any], warm: dict[str, Any], max_change: float) -> str | None:
    """How two greedy answers differ beyond rounding; None if they do not.

    Tokens must be equal up to the first tie; their log-probabilities may differ by `max_change`.
    """
    scored = [answer["meta_info"]["output_token_logprobs"] for answer in (cold, warm)]
    if len(scored[0]) != len(scored[1]):
        return f"{len(scored[0])} tokens cold, {len(scored[1])} warm"
    for index, (before, after) in enumerate(zip(*scored, strict=True)):
        if before[1] != after[1]:
            best, second = cold["meta_info"]["output_top_logprobs"][index]
            is_tie = best[0] - second[0] < 2 * max_change
            return None if is_tie else f"token {index} is {before[1]} cold and {after[1]} warm"
        if abs(before[0] - after[0]) > max_change:
            return f"the log-probability of token {index} is {before[0]} cold and {after[0]} warm"
    return None


if __name__ == "__main__":
    sys.exit(main())
