"""What an engine asks of the kernels for this CPU, which `ops` runs. They are imported when they are asked for."""

from collections.abc import Mapping

from jsg.kernels_pallas import ops


def is_faster_in_bfloat16() -> bool:
    """Whether the default device is a CPU that multiplies bfloat16 faster than float32."""
    if ops.target_platform() != "cpu":
        return False
    from jsg.kernels_pallas.native import amx, library

    return amx.is_available() or library.multiplies_pairs()


def native_object_files() -> dict[str, bytes]:
    """The machine code of the kernels that programs for this CPU call, by name, of all that were traced so far."""
    from jsg.kernels_pallas.native import library

    return library.object_files()


def register_native(files: Mapping[str, bytes]) -> None:
    """Makes kernels known to XLA that `native_object_files` gave, so that programs that call them need no trace."""
    from jsg.kernels_pallas.native import library

    library.register_all(files)
