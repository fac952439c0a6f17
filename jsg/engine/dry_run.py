"""`jsg check MODEL --dry-run`: what is known of a model before its weights are here, and on which cards it fits.

Nothing is loaded or compiled, and no accelerator is opened. The memory is divided by the functions of the memory plan.
The temporaries of a step, which a plan takes from compiled programs, are their bound here.
"""

import collections
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from jsg.config import EngineConfig
from jsg.engine.device import cards, fp8_kernels
from jsg.engine.device.memory import largest_step_bound, usable_bytes
from jsg.engine.device.pool_sizes import pool_sizes
from jsg.engine.embedder import read_embedder
from jsg.engine.problems import find_problems
from jsg.engine.shapes import ACCELERATOR_CHUNK
from jsg.engine.startup import plan_of, settle
from jsg.errors import ConfigError, JsgError, MemoryPlanError, ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.block_spec import StateMixer
from jsg.models.decoder import Decoder
from jsg.models.llava import Llava
from jsg.models.loading import abstract_model, resolve_dtype, resolve_kv_dtype, with_kept
from jsg.models.quantise import BYTES_PER_NUMBER
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import AXES, bytes_on_one_device
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from jsg.types import Embedder

QUANTIZATIONS = ("none", *BYTES_PER_NUMBER)
TP_SIZES = (1, 2, 4, 8)
GIB = 2**30
LEGEND = (
    "Tokens of the KV pool beside the weights and the largest step; in brackets if a request of {} tokens is longer,\n"
    "- if the weights leave no room, x if the model does not run so."
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a model fits on cards.

    Attributes:
        card: Their name.
        quantization: As `--quantization`.
        tp_size: How many there are.
        tokens: For how many tokens of the KV pool there is room beside the weights.
        states: How many states of prefixes are kept beside them, if layers keep a state of each request.
        fits: Whether these are as many as a request may have.
        refusal: Why the model does not run on such cards whatever memory they have; empty if it does.
        rounds_rows: Whether there are products whose rows are rounded to e4m3: see `--fp8-products`.
    """

    card: str
    quantization: str
    tp_size: int
    tokens: int = 0
    states: int = 0
    fits: bool = False
    refusal: str = ""
    rounds_rows: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What is known of a model before its weights are here.

    Attributes:
        problems: Why it cannot be served, a sentence each.
        model: What it computes, without refused fields; None if that is not known.
        dtype: The type of weights that are not quantised.
        context_length: Tokens of one request at most.
        kv_bytes: Bytes of keys and values of a token, in all layers.
        request_bytes: Those of one request of `context_length` tokens. Layers with a window keep a part of them.
        weights: Bytes of weights by `--quantization`.
        fits: On which cards it fits.
    """

    problems: tuple[str, ...]
    model: ModelSpec | None = None
    dtype: str = ""
    context_length: int = 0
    kv_bytes: int = 0
    request_bytes: int = 0
    weights: dict[str, int] = dataclasses.field(default_factory=dict)
    fits: tuple[Fit, ...] = ()

    def __str__(self) -> str:
        lines = []
        if self.model is not None:
            lines += [*_shown(self.model), *self._sizes()]
        lines.append(f"refused: {'no' if not self.problems else ''}".rstrip())
        lines += [f"  {problem}" for problem in self.problems]
        if self.problems and self.model is not None:
            lines.append("All figures here are those of the model without the refused fields.")
        if self.fits:
            lines += ["", LEGEND.format(self.context_length)]
        if any(fit.states for fit in self.fits):
            lines.append("Behind + is how many states of prefixes are kept.")
        for quantization in self.weights:
            lines += ["", *self._table(quantization)]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs. Lengths are tokens."""
        return {
            "problems": list(self.problems),
            "model": None if self.model is None else _described(self.model),
            "dtype": self.dtype,
            "context_length": self.context_length,
            "kv_bytes_per_token": self.kv_bytes,
            "kv_bytes_per_request": self.request_bytes,
            "weight_bytes": self.weights,
            "fits": [
                {"memory_bytes": cards.card(fit.card).memory_bytes, **dataclasses.asdict(fit)} for fit in self.fits
            ],
        }

    @property
    def _plain(self) -> str:
        """How weights are without --quantization."""
        is_kept = self.model is not None and self.model.names.kept
        return "as in the checkpoint" if is_kept else f"in {self.dtype}"

    def _sizes(self) -> list[str]:
        weights = ", ".join(
            f"{_size(size)} {self._plain if name == 'none' else f'in {name}'}" for name, size in self.weights.items()
        )
        whole = _size(self.request_bytes)
        lines = [
            f"weights: {weights}",
            f"KV:      {self.kv_bytes} bytes a token, {whole} for a request of {self.context_length} tokens",
        ]
        if self.model is not None and (size := self.model.state_bytes(2)):
            tokens = size // self.kv_bytes
            lines.append(f"states:  {_size(size)} a request and a prefix that is kept, as KV of {tokens} tokens")
        return lines

    def _table(self, quantization: str) -> list[str]:
        """For each card and number of cards, the tokens of the KV pool, in brackets if they hold no whole request."""
        kernels = f"weights {self._plain}" if quantization == "none" else f"--quantization {quantization}"
        fits = [fit for fit in self.fits if fit.quantization == quantization]
        sizes = sorted({fit.tp_size for fit in fits})
        lines = [f"{kernels:<30}" + "".join(f"{f'--tp-size {size}':>14}" for size in sizes)]
        by_card: dict[str, list[Fit]] = {}
        for fit in fits:
            by_card.setdefault(fit.card, []).append(fit)
        refusals: dict[str, None] = {}
        for card, row in by_card.items():
            name = f"{card} ({cards.card(card).memory_bytes / GIB:.0f} GiB)"
            lines.append(f"{name:<30}" + "".join(f"{_cell(fit):>14}" for fit in row))
            refusals |= dict.fromkeys(fit.refusal for fit in row if fit.refusal)
        if rounding := [card for card, row in by_card.items() if any(fit.rounds_rows for fit in row)]:
            lines.append(f"products in e4m3, unless --fp8-products off: {', '.join(rounding)}")
        return lines + [f"x: {refusal}" for refusal in refusals]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _cell(fit: Fit) -> str:
    if fit.refusal:
        return "x"
    if not fit.tokens:
        return "-"
    return f"{fit.tokens}{f'+{fit.states}' if fit.states else ''}" if fit.fits else f"({fit.tokens})"


def dry_run(config: EngineConfig) -> DryRun:
    """Judges a model by its `config.json`, by the index of its weights and by its tokenizer, if they are there.

    Raises:
        JsgError: There is no such model, or an option is impossible.
    """
    jax.config.update("jax_platforms", "cpu")  # if JAX has not started, which then opens no accelerator
    with tempfile.TemporaryDirectory(prefix="jsg-") as folder:
        directory, files = _find(config, Path(folder))
        model, problems = find_problems(directory, files, config.load_format, drafts=config.speculative != "off")
        embedder = None
        if model is not None:
            try:
                embedder = read_embedder(directory, config.task, model)
            except ModelError as error:
                problems.append(str(error))
        problems += _tokenizer_problems(Path(config.tokenizer_path or directory))
    if model is None:
        return DryRun(problems=tuple(problems))
    try:
        model = with_kept(directory, model, config.load_format)
    except ModelError as error:
        problems.append(str(error))
    if embedder is not None:
        model = dataclasses.replace(model, tie_word_embeddings=True, draft=None)
    return _sized(config, directory, model, embedder, problems)


def _find(config: EngineConfig, folder: Path) -> tuple[Path, Sequence[str]]:
    """The directory of the model, and the names of all its files. A lone config.json is copied to the folder."""
    path = Path(os.path.expanduser(config.model_path))
    if path.is_file() and path.suffix == ".json":
        shutil.copy(path, folder / "config.json")
        return folder, ["config.json"]
    found: list[str] = []

    def note(_: Path, files: Sequence[str]) -> None:
        found.extend(files)

    directory = resolve_model(config.model_path, load_format="index", judge=note)
    return directory, found or os.listdir(directory)


def _tokenizer_problems(directory: Path) -> list[str]:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return []
    try:
        load_tokenizer(directory)
    except JsgError as error:
        return [str(error)]
    return []


def _sized(
    config: EngineConfig, directory: Path, model: ModelSpec, embedder: Embedder | None, problems: list[str]
) -> DryRun:
    """The report on a model that was read."""
    dtype = resolve_dtype(config.dtype, "gpu")
    quantizations = QUANTIZATIONS if config.quantization == "none" else (config.quantization,)
    tp_sizes = TP_SIZES if config.tp_size == 1 else (config.tp_size,)
    weights: dict[str, int] = {}
    fits: list[Fit] = []
    for quantization in quantizations:
        try:
            weights[quantization], _ = weight_bytes(model, dtype, quantization, 1, 1)
        except ModelError as error:
            problems.append(str(error))
            continue
        for tp_size in tp_sizes:
            own = dataclasses.replace(config, quantization=quantization, tp_size=tp_size)
            fits += _fits(own, directory, model, embedder)
    kv_itemsize = resolve_kv_dtype(config.kv_cache_dtype, dtype).itemsize
    length = config.context_length or model.max_position_embeddings
    sizes = pool_sizes(
        model.for_context(length),
        kv_itemsize,
        num_devices=1,
        page_size=config.page_size or 1,
        chunk=config.chunked_prefill_size or ACCELERATOR_CHUNK,
        max_running=1,
        context_length=length,
    )
    return DryRun(
        problems=tuple(problems),
        model=model,
        dtype=dtype.name,
        context_length=length,
        kv_bytes=model.kv_bytes_per_token(kv_itemsize),
        request_bytes=sizes.num_bytes(length),
        weights=weights,
        fits=tuple(sorted(fits, key=lambda fit: (cards.card(fit.card).memory_bytes, fit.card, fit.tp_size))),
    )


def _fits(config: EngineConfig, directory: Path, model: ModelSpec, embedder: Embedder | None) -> list[Fit]:
    """How so many cards of each kind hold a model with these options."""
    options: dict[str, Any] = {"quantization": config.quantization, "tp_size": config.tp_size}
    dtype = resolve_dtype(config.dtype, "gpu")
    try:
        model = model.over_devices(config.tp_size, config.ep_size)
        shape = (model, dtype, config.quantization, config.tp_size, config.ep_size)
        held = {False: weight_bytes(*shape)}
    except (ModelError, ConfigError) as error:
        return [Fit(card=name, refusal=str(error), **options) for name in cards.NAMES]
    found = []
    for name in cards.NAMES:
        device = cards.card(name).target.device(config.tp_size, "it is judged without one")
        options["rounds_rows"] = False
        try:
            settings = settle(config, directory, device, None, (model, embedder))
            options["rounds_rows"] = rounds_rows = fp8_kernels.rounds_rows(device, config, model)
            if rounds_rows not in held:
                held[rounds_rows] = weight_bytes(*shape, rounds_rows=rounds_rows)
            weights, restored = held[rounds_rows]
            bound = largest_step_bound(
                model, settings.buckets, dtype, restored_bytes=restored, num_devices=config.tp_size
            )
            plan = plan_of(settings, usable_bytes(config.mem_fraction_static, device), weights, bound)
            found.append(Fit(card=name, tokens=plan.pool_tokens, states=plan.num_states, fits=True, **options))
        except MemoryPlanError as error:
            found.append(Fit(card=name, tokens=error.left_tokens, **options))
        except ConfigError as error:
            found.append(Fit(card=name, refusal=str(error), **options))
    return found


def weight_bytes(
    model: ModelSpec,
    dtype: jnp.dtype,
    quantization: str,
    num_devices: int,
    num_groups: int,
    *,
    rounds_rows: bool = False,
) -> tuple[int, int | None]:
    """The bytes of weights on one of several devices, and of the largest kernel that a step restores from few bits.

    For rows of 16 bits NVIDIA cards restore none but experts whose inputs have an order of their own. The second is
    None if no kernel is in few bits. Layers of equal records have as many bytes, so one of them counts. With
    `rounds_rows` kernels in e4m3 are laid out as products take them whose rows are rounded too.
    """
    # Layers of equal records may be kept in other forms.
    kinds = collections.Counter(model.layers) if not model.names.kept else dict.fromkeys(range(model.num_layers), 1)
    few = model if model.names.kept else dataclasses.replace(model, layers=tuple(kinds))
    mesh = None if num_devices == 1 else AbstractMesh((num_groups, num_devices // num_groups), AXES)
    made = abstract_model(few, dtype, quantization, mesh)
    if rounds_rows:
        fp8_kernels.lay_out(made)
    text = cast(Decoder, made.text if isinstance(made, Llava) else made)
    total = _num_bytes(made) + sum(
        (count - 1) * _num_bytes(layer) for layer, count in zip(text.layers, kinds.values(), strict=True)
    )
    if quantization == "none" and not model.names.kept:
        return total, None
    kernels = jax.tree.leaves(nnx.state(made), is_leaf=lambda leaf: isinstance(leaf, Quantised))
    restored = [leaf for leaf in kernels if isinstance(leaf, Quantised) and not leaf.form.scales_columns]
    if dtype.itemsize == 2:
        restored = [leaf for leaf in restored if leaf.form.has_order and leaf.axis > 0]
    counts = [leaf.form.per_byte * bytes_on_one_device(leaf.values) for leaf in restored]
    return total, max((count * dtype.itemsize for count in counts), default=0)


def _num_bytes(module: nnx.Module) -> int:
    return sum(map(bytes_on_one_device, jax.tree.leaves(nnx.state(module))))


def _described(model: ModelSpec) -> dict[str, Any]:
    """The shape of a model: how many layers have which attention, and which experts."""
    heads = collections.Counter(
        (spec.heads, spec.kv_heads, spec.head_dim, spec.window)
        for spec in (layer.attention for layer in model.layers)
        if not isinstance(spec, StateMixer)
    )
    experts = collections.Counter(layer.experts for layer in model.layers if layer.experts is not None)
    names = ("heads", "kv_heads", "head_dim", "window", "num_layers")
    return {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "context_length": model.max_position_embeddings,
        "attention": [
            dict(zip(names, (*kind, window and window._asdict(), count), strict=True))
            for (*kind, window), count in heads.items()
        ],
        "experts": [
            {"count": mlp.count, "per_token": mlp.router.choice.per_token, "num_layers": count}
            for mlp, count in experts.items()
        ],
        "num_state_layers": len(model.state_shapes),
        "state_bytes": model.state_bytes(2),
        "sees_images": model.vision is not None,
        "notes": list(model.notes),
    }


def _shown(model: ModelSpec) -> list[str]:
    """The same for people."""
    shape = _described(model)
    heads = sorted({(kind["heads"], kind["kv_heads"], kind["head_dim"]) for kind in shape["attention"]})
    windows = collections.Counter(window for window in model.layer_windows if window is not None)
    experts = {(kind["count"], kind["per_token"]): None for kind in shape["experts"]}
    text = f"model:   {model.architecture}, {model.num_layers} layers of width {model.hidden_size}"
    text += "".join(f", {heads} heads of {dim} ({kv_heads} of keys and values)" for heads, kv_heads, dim in heads)
    text += "".join(f", {count} layers with a window of {window}" for window, count in windows.items())
    if shape["num_state_layers"]:
        text += f", {shape['num_state_layers']} layers that keep a state of each request"
    text += "".join(f", {count} experts of which a token uses {per_token}" for count, per_token in experts)
    text += ", and a tower that sees images" if shape["sees_images"] else ""
    text += ", and a layer that drafts tokens" if model.draft else ""
    return [text, f"context: {model.max_position_embeddings} tokens", *(f"note:    {note}" for note in model.notes)]
