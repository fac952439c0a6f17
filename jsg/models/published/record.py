"""How the kernels of a published checkpoint are quantised, by its `config.json` and the files beside it.

No JAX and no numpy.
"""

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from jsg.errors import ModelError
from jsg.kernels_pallas.form import Form
from jsg.models.published.layout import Group, Layout, full_name, module_of
from jsg.models.without_effect import refuse_unknown
from jsg.sources import MAX_INTEGER, Fields

COMMON = (".scale",)
"""Marks that tensors of other kinds have, too. They count if the kernel is there."""
_MAKING = frozenset(
    "quant_method producer meta quantizer tokenizer dataset batch_size seqlen nsamples iters iterations lr minmax_lr "
    "amp damp_percent damp_auto_increment mse static_groups true_sequential act_group_aware gptaq hyb_act "
    "model_seqlen model_name_or_path model_file_base_name block_name_to_quantize to_quant_block_names "
    "module_name_preceding_first_block modules_in_block_to_quantize max_input_length pad_token_id cache_block_outputs "
    "low_gpu_mem_usage gradient_accumulate_steps enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input "
    "autoround_version data_type scale_dtype mock_quantization offload_to_disk offload_to_disk_path parallel_packing "
    "device backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config use_exllama disable_exllama use_cuda_fp16 "
    "global_compression_ratio".split()
)
"""Fields that say how a checkpoint was made, and how other programs compute with it."""
MAX_REPEATS = 4
"""The most repeats in an expression."""
UNREAD = re.compile(r".*[._](input|activation|output|q|k|v|kv)_(global_)?(scale|zero_point)(_ub)?")
"""Names of tensors that say how activations and cached keys and values are rounded. jsg does not round them so."""

Rule = Callable[[str], str | None]
"""From the name of a module to the reason why a list means it, or None."""


class KeptForm(NamedTuple):
    """How a kernel can be kept in few bits. Those that make one parameter are joined.

    Attributes:
        form: The form.
        order: A word for the order of its inputs; empty if it has none.
        is_turned: The model has it as [..., in, out].
    """

    form: Form
    order: str
    is_turned: bool

    def joined(self, other: "KeptForm") -> "KeptForm | None":
        """How both kernels can be kept in one; None if they cannot."""
        if self == other:
            return self
        form = self.form.joined(other.form)
        return None if form is None or self[1:] != other[1:] else self._replace(form=form)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How kernels are stored in few bits.

    Attributes:
        title: What they are, in words.
        where: The file and the field that say so.
        marks: The end of a name that only a part of such a kernel has → the end of the kernel's name.
        roles: The other ends, after the kernel's name or from a dot on after the module's.
        layout: The layout of a kernel.
        skips: The rule that says that a module of this name is not quantised; None if there is none.
        adds_biases: Modules may have biases that the model has not, which are zero then.
    """

    title: str
    where: str = ""
    marks: Mapping[str, str]
    roles: tuple[str, ...]
    layout: Callable[[Group], Layout]
    skips: Rule
    adds_biases: bool = False

    def sorted(self, names: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
        """The kernels in few bits that these tensors make, and the names of the tensors that are read as they are.

        A kernel is the name of each of its tensors by role.

        Raises:
            ModelError: There is no such kernel.
        """
        held = dict.fromkeys(names)
        found = dict.fromkeys(
            kernel
            for name in held
            for mark, end in self.marks.items()
            if name.endswith(mark) and ((kernel := name.removesuffix(mark) + end) in held or mark not in COMMON)
        )
        if held and not found:
            raise ModelError(
                f"{self.where} says that kernels are quantised ({self.title}), but the checkpoint holds none that is; "
                "remove the field, or download the checkpoint again"
            )
        roles, kernels = ("", *self.roles), dict[str, dict[str, str]]()
        for kernel in found:
            kernels[kernel] = {role: name for role in roles if (name := full_name(kernel, role)) in held}
        parts = {name for kernel in kernels.values() for name in kernel.values()}
        return kernels, [name for name in held if name not in parts and not UNREAD.fullmatch(name)]

    def check_skips(self, kernels: Iterable[str], here: Callable[[str], str]) -> None:
        """Raises ModelError if one of these kernels is in few bits, but must not be."""
        for name in kernels:
            for each in dict.fromkeys((name, here(name))):
                if (rule := self.skips(module_of(each))) is not None:
                    raise ModelError(
                        f"{self.where} says that {name} is not quantised ({rule!r}), but the checkpoint holds it in "
                        "few bits; are config.json and the checkpoint of one model?"
                    )


def read_rule(config: Fields, syntax: Literal["transformers", "modelopt", "compressed-tensors"], *names: str) -> Rule:
    """The rule of a list of modules, the first of these fields: which pattern means a module; None if none does.

    In transformers it is the beginning of a name or an expression for it, up to the end of a module, or any end of the
    name. ModelOpt's names may have wildcards, and mean all in a module. Those of compressed-tensors mean one module,
    unless an expression follows `re:`.
    """
    name = next((name for name in names if config.get(name) is not None), names[0])
    listed = config.get(name, [])
    ok = isinstance(listed, list) and all(isinstance(pattern, str) and pattern for pattern in listed)
    config.require(ok, name, "be a list of names of modules", listed)
    exact, expressions = set[str](), dict[str, re.Pattern[str]]()
    for pattern in listed:
        if syntax == "compressed-tensors" and pattern.startswith("re:"):
            expressions[pattern] = expression_of(config, name, pattern.removeprefix("re:"))
        elif syntax == "modelopt" and re.search(r"[*?[]", pattern):
            expressions[pattern] = re.compile(fnmatch.translate(pattern))
        elif syntax == "transformers" and not re.fullmatch(r"[\w.-]+", pattern):
            expressions[pattern] = expression_of(config, name, pattern, r"(?:%s)(?:(?<=\.)|(?=\.|$))")
        else:
            exact.add(pattern.rstrip("."))
    ends = tuple(listed) if syntax == "transformers" else ()

    def rule(name: str) -> str | None:
        if name.endswith(ends):
            return next(pattern for pattern in listed if name.endswith(pattern))
        around = [name] if syntax == "compressed-tensors" else itertools.accumulate(name.split("."), "{}.{}".format)
        if (found := next(filter(exact.__contains__, around), None)) is not None:
            return found
        return next((pattern for pattern, each in expressions.items() if each.match(name)), None)

    return rule


def expression_of(config: Fields, name: str, text: str, frame: str = "%s") -> re.Pattern[str]:
    """A regular expression of a field, or if it is none what is literally so, in a frame.

    Python tries all ways in which repeats can share out a name. So a group is not repeated, for which they could be 2^n
    of n characters, and there are few repeats.

    Raises:
        FieldError: The expression repeats more.
    """
    plain = re.sub(r"\\.|\[\^?\]?[^]]*\]", "x", text)  # a backslash and classes have characters that mean nothing
    repeats = re.findall(r"(\)?)(?:[*+]|\{)", plain)
    ok = len(repeats) <= MAX_REPEATS and not any(repeats)
    config.require(ok, name, f"have expressions with at most {MAX_REPEATS} repeats, and none of a group", text)
    try:
        return re.compile(frame % text)
    except re.error:
        return re.compile(frame % re.escape(text))


def refuse_others(config: Fields, known: str, what: str) -> None:
    """Raises FieldError for a field beside these, which may change what numbers mean. See `refuse_unknown`."""
    refuse_unknown(config, {*_MAKING, *known.split()}, what)


def require_one_of(config: Fields, name: str, *values: Any, default: Any = None) -> Any:
    """The value of a field, which must be one of these."""
    value = config.get(name, default)
    ok = any(value == each and type(value) is type(each) for each in values)
    config.require(ok, name, f"be {' or '.join(map(str, values))}", value)
    return value


def read_block(config: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None if the file does not say."""
    block = config.get(name)
    ok = block is None or (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= MAX_INTEGER for n in block)
    )
    config.require(ok, name, "be two positive integers", block)
    return None if block is None else (block[0], block[1])
