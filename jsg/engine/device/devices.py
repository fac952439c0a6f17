"""Chooses the device that JAX gets and how much of its memory, before JAX looks for a device.

By itself JAX opens every GPU that it sees and reserves three quarters of the memory of each. An engine uses `--tp-size`
GPUs, so it shows JAX those with the most free memory, and lets JAX reserve `--mem-fraction-static` of it. Variables
that the user has set are left as they are.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether it has started

from jsg.engine.nvidia_smi import MIB, VISIBLE, Gpu, find_gpus, has_cuda_plugin, may_use_cuda, most_free, named_gpus
from jsg.engine.tpu_chips import VISIBLE as CHIPS
from jsg.engine.tpu_chips import chip_devices, has_libtpu
from jsg.errors import ConfigError, MemoryPlanError
from jsg.extras import install_command

logger = logging.getLogger(__name__)

FRACTION = "XLA_CLIENT_MEM_FRACTION"
FRACTIONS = (FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX raises where both are set
E4M3_CAPABILITY = (8, 9)
FP8_KERNEL_CAPABILITY = (9, 0)
OUTSIDE_BYTES = 2**30
"""Memory that JAX does not reserve, for the CUDA context and loaded programs. Not measured on a device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Variables to set before JAX starts, and why.

    Attributes:
        gpu: The GPU that JAX will use, or of several the one with the smallest part free; None if it is not known.
        why: The reason, as a clause for people.
        environment: Variables to set while JAX starts.
    """

    gpu: Gpu | None
    why: str
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of this engine.

    Attributes:
        platform: JAX's name of its kind: "cpu", "gpu", "tpu".
        kind: The name that the device gives itself.
        gpu: What `nvidia-smi` listed before JAX started; None where it is not known.
        why: Why the device was chosen.
        count: Devices of that kind that the engine uses together.
        capability: The compute capability of a GPU from NVIDIA, such as (9, 0); None for any other device.
        described_bytes: The memory of a device that is not here; None if JAX has started on it.
    """

    platform: str
    kind: str
    gpu: Gpu | None
    why: str
    count: int = 1
    capability: tuple[int, int] | None = None
    described_bytes: int | None = None

    @property
    def name(self) -> str:
        """Platform, number and kind, for people."""
        return f"{self.platform}: {self.kind}" if self.count == 1 else f"{self.platform}: {self.count} x {self.kind}"

    def __str__(self) -> str:
        memory = "" if self.described_bytes is None else f", {self.described_bytes / 2**30:.1f} GiB"
        if self.gpu is not None:
            free = "free" if self.count == 1 else "free on the fullest"
            memory = f", {self.gpu.total_bytes / 2**30:.1f} GiB, {self.gpu.free_bytes / 2**30:.1f} GiB {free}"
        return f"{self.name}{memory}; {self.why}"


def open_device(mem_fraction: float, count: int = 1) -> Device:
    """Starts JAX on `count` devices and leaves the environment as it was.

    Args:
        mem_fraction: Part of a GPU's whole memory that JAX may reserve.
        count: Devices of one kind that run the model together. A CPU stands for as many as are asked for.

    Raises:
        ConfigError: The platform that JAX was told to use does not start, or has fewer devices.
        MemoryPlanError: Other processes hold nearly all of every GPU's memory.
    """
    if xla_bridge.backends_are_initialized():
        choice = Choice(gpu=None, why="JAX had started before, with the memory that it took then", environment={})
        gpus = ()
    else:
        gpus = find_gpus() if may_use_cuda(os.environ, _platforms()) else ()
        try:
            choice = choose(gpus, mem_fraction, os.environ, count)
        except MemoryPlanError:
            if has_cuda_plugin():
                raise
            choice = choose((), mem_fraction, os.environ)  # JAX cannot use a GPU, so full ones do not matter
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)
    try:
        with _environment(choice.environment):
            device = jax.local_devices()[0]
    except (RuntimeError, AssertionError) as error:  # an assertion of JAX, where the platform has no plugin
        raise ConfigError(
            f"JAX must find a device of JAX_PLATFORMS={_platforms()}, but could not start one; unset it, install JAX "
            "for this platform, or repair its driver"
        ) from error
    seen = len(jax.local_devices())
    if seen < count:
        raise ConfigError(
            f"--tp-size {count} needs as many devices, but JAX sees {seen} ({device.platform}); lower it, name as many "
            f"in {VISIBLE}, or begin with a new process where JAX had started before"
        )
    if device.platform == "cpu":
        if gpus:
            logger.warning(_why_no_gpu(gpus[0]))
        if (not _platforms() or "tpu" in _platforms().split(",")) and (num_chips := len(chip_devices())):
            logger.warning(_why_no_tpu(num_chips))
        return Device(platform="cpu", kind=device.device_kind, gpu=None, why="JAX has no other device", count=count)
    if device.platform == "gpu" and seen > count:
        logger.warning(
            f"JAX sees {seen} GPUs and reserves memory on each, but this engine uses the first {count} only; "
            f"name those in {VISIBLE}"
        )
    if device.platform == "tpu" and seen > count:
        logger.warning(
            f"this process opened {seen} devices of a TPU, but this engine uses the first {count} only, and no other "
            f"process can use the rest; raise --tp-size, start more engines with --dp-size, or name chips in {CHIPS}"
        )
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        gpu=choice.gpu,
        why=choice.why,
        count=count,
        capability=_capability(getattr(device, "compute_capability", "")),
    )


def _capability(text: str) -> tuple[int, int] | None:
    """The numbers of "9.0"; None for what GPUs of other makers say, such as "gfx942"."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def multiplies_e4m3(device: Device, fp8_products: str) -> bool:
    """Whether products round their rows to e4m3 where kernels are, by `--fp8-products`.

    Raises:
        ConfigError: They must, but this GPU does not multiply e4m3.
    """
    capability = device.capability
    has_them = capability is not None and capability >= E4M3_CAPABILITY
    if fp8_products == "on" and not has_them and device.platform != "cpu":
        card = f"the {device.kind}" if capability is None else _named(device, capability)
        raise ConfigError(f"--fp8-products on needs a CPU or compute capability 8.9, but this is {card}; use auto")
    return fp8_products == "on" or (fp8_products == "auto" and has_them)


def _named(device: Device, capability: tuple[int, int]) -> str:
    return f"the {device.kind} with compute capability {'.'.join(map(str, capability))}"


def check_number_types(device: Device, *, kv_cache_dtype: str, quantization: str, fp8_products: str) -> None:
    """Refuses options for 8-bit floating-point numbers that this GPU cannot run, or only slowly.

    Both limits were found by compiling for the cards: below 8.9 no kernel of ours with e4m3 can be lowered, and below
    9.0 XLA writes every kernel in fp8 anew in bfloat16 in every step, unless rows are in e4m3 too.

    Raises:
        ConfigError: The message names the option to use instead.
    """
    multiplies_e4m3(device, fp8_products)  # for its check
    if device.capability is None:
        return
    card = f"the {device.kind} has compute capability {'.'.join(map(str, device.capability))}"
    if kv_cache_dtype == "fp8_e4m3" and device.capability < E4M3_CAPABILITY:
        raise ConfigError(f"--kv-cache-dtype fp8_e4m3 needs compute capability 8.9, but {card}; use fp8_e5m2")
    if quantization != "fp8" or device.capability >= FP8_KERNEL_CAPABILITY:
        return
    if device.capability < E4M3_CAPABILITY:
        raise ConfigError(f"--quantization fp8 needs compute capability 8.9, but {card}; use int8, which takes as much")
    if fp8_products == "off":
        raise ConfigError(f"--fp8-products off needs compute capability 9.0, but {card}; use auto, or int8")


def processor() -> str:
    """The name of this machine's processor, with a digest of what it can do."""
    info = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
        info = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    features = hashlib.sha256(
        " ".join(sorted(info.get("flags", info.get("Features", "")).split())).encode()
    ).hexdigest()[:8]
    return f"{info.get('model name', 'unknown')} with features {features}"


def choose(gpus: tuple[Gpu, ...], mem_fraction: float, environment: Mapping[str, str], count: int = 1) -> Choice:
    """Chooses the GPUs with the most free memory, unless the user has chosen, and how much of it to reserve.

    Args:
        gpus: All GPUs.
        mem_fraction: Part of a GPU's whole memory that is asked for.
        environment: The variables that the user has set.
        count: How many GPUs are needed.

    Raises:
        MemoryPlanError: Other processes hold nearly all of every GPU's memory.
    """
    to_set: dict[str, str] = {}
    if VISIBLE in environment:
        used, why = named_gpus(gpus, environment, count), f"{VISIBLE} names {'it' if count == 1 else 'them'}"
    elif gpus:
        used = most_free(gpus, count)
        numbers = ", ".join(str(gpu.index) for gpu in used)
        most = f"number {numbers} has" if len(used) == 1 else f"numbers {numbers} have"
        why = f"of {len(gpus)} GPUs {most} the most free memory" if len(gpus) > len(used) else "all GPUs"
        why = "the only GPU" if len(gpus) == 1 else why
        to_set[VISIBLE] = ",".join(gpu.uuid for gpu in used)
    else:
        used, why = (), "JAX's first device" if count == 1 else "JAX's first devices"
    gpu = min(used, key=_free_part, default=None)  # limits what can be reserved on each
    given = next((name for name in FRACTIONS if name in environment), None)
    if given is not None:
        return Choice(gpu=gpu, why=f"{why}; {given} limits its memory", environment=to_set)
    fraction = mem_fraction if gpu is None else min(mem_fraction, _free_part(gpu))
    if gpu is not None and fraction <= 0:
        raise MemoryPlanError(
            f"the GPU {gpu.name}, number {gpu.index}, has {gpu.free_bytes / MIB:.0f} of {gpu.total_bytes / MIB:.0f} MiB"
            f" free, which leaves nothing beside the {OUTSIDE_BYTES / MIB:.0f} MiB that CUDA itself may need; end the"
            f" processes that hold its memory (nvidia-smi lists them), or name another GPU in {VISIBLE}"
            + (", or lower --tp-size" if count > 1 else "")
        )
    if fraction < mem_fraction:
        why += f"; {fraction:.2f} of its memory is free to reserve, not the {mem_fraction:g} of --mem-fraction-static"
    return Choice(gpu=gpu, why=why, environment=to_set | {FRACTION: f"{fraction:.4f}"})


def _free_part(gpu: Gpu) -> float:
    """The part of a GPU's whole memory that JAX may reserve."""
    return (gpu.free_bytes - OUTSIDE_BYTES) / gpu.total_bytes


def _platforms() -> str:
    """The platforms that JAX was told to use; empty if it uses whatever it finds."""
    return jax.config.jax_platforms or ""


def _why_no_gpu(gpu: Gpu) -> str:
    if has_cuda_plugin():
        remedy = "JAX's CUDA plugin is installed but did not start: is the driver as new as its CUDA version needs?"
    else:
        remedy = f"JAX for CUDA is not installed: {install_command('cuda')}"
    return f"this machine has an {gpu.name}, but JAX runs on the CPU. {remedy}"


def _why_no_tpu(num_chips: int) -> str:
    remedy = "libtpu is installed but did not start: does another process use the chips?"
    if not has_libtpu():
        remedy = f"JAX for TPUs is not installed: {install_command('tpu')}"
    return f"this machine has {num_chips} chips of a TPU, but JAX runs on the CPU. {remedy}"


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that were not set, and removes them again: CUDA and JAX read them once, at their start."""
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]
