"""The grammar process: `python -m jsg.engine.child.grammar_process PID`. Only `grammar_workers.py` starts it.

It reads grammars, and sets of patterns, from standard input, and writes the tables of each, or the reason why there are
none, to standard output. Each message is a frame: a length, then msgpack. An empty frame comes first and says that the
process is ready. It is a process because compiling is Python and may take seconds: in a thread of the front or of the
engine it would stop every stream. It knows no vocabulary and keeps nothing between grammars.
"""

import gc
import logging
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from jsg.constrained.text_patterns import PatternSet, pattern_tables
from jsg.engine.child.log import log_to_stderr
from jsg.engine.child.parent import die_with_parent
from jsg.engine.child.protocol import Failure
from jsg.errors import GrammarError
from jsg.types import GrammarSpec

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<I")  # of a message to or from the process: the length of what follows
OUT_OF_TIME = signal.SIGPROF
"""The signal that ends a process whose grammar takes more CPU time than it may. The process ends, because an exception
could come anywhere in the compiler and leave it in a state that no later grammar may be compiled in."""
MEMORY_BYTES = 4 * 2**30
"""The most address space of the process. Fuel keeps a grammar far below it; this is for the case that fuel fails to."""
STDIN, STDOUT, STDERR = 0, 1, 2
BUG = "the grammar could not be compiled for a reason that is not its fault; the server's log has the cause"


def frame(payload: bytes) -> bytes:
    """A payload with its length in front."""
    return HEADER.pack(len(payload)) + payload


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame; None at the end of the input."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    return source.read(size)


def answer(spec: GrammarSpec | PatternSet) -> bytes | Failure:
    """The tables of a grammar or of patterns. Whatever goes wrong becomes a failure of that grammar."""
    from jsg.constrained.compiler import compile_tables

    try:
        if isinstance(spec, PatternSet):
            return msgspec.msgpack.encode(pattern_tables(spec))
        return compile_tables(spec).to_bytes()
    except GrammarError as error:
        return Failure.of(error)
    except MemoryError:
        return Failure.of(too_costly(spec, "the grammar needs too much memory to compile"))
    except Exception:
        logger.exception("a grammar of kind %s could not be compiled", spec.kind)
        return Failure.of(GrammarError(BUG, param=spec.kind))


def too_costly(spec: GrammarSpec | PatternSet, rule: str) -> GrammarError:
    """The error for a grammar that costs too much as a whole. It names the field to blame, or else the kind."""
    field = spec.field if isinstance(spec, GrammarSpec) else None
    return GrammarError(f"{rule if field else f'{spec.kind}: {rule}'}; simplify it", spec.kind, field)


def limit_memory() -> None:
    """Gives this process `MEMORY_BYTES`, or less where its user may have less (`ulimit -v`)."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(parent_pid: int) -> None:
    """Answers until the input ends. With each grammar comes the CPU time that it may take, in seconds."""
    die_with_parent(parent_pid)
    log_to_stderr("grammars")
    for number in (signal.SIGINT, signal.SIGTERM):  # the front's to obey
        signal.signal(number, signal.SIG_IGN)
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)
    limit_memory()
    with os.fdopen(os.dup(STDIN), "rb") as source, os.fdopen(os.dup(STDOUT), "wb") as sink:
        os.dup2(STDERR, STDOUT)  # whatever a library prints must not look like an answer
        from jsg.constrained.compiler import warm

        warm()  # so that the first grammar need not wait for it
        # A grammar makes tens of thousands of small objects that live until its end. Collecting garbage among them
        # would take a third of the time, so it is done between two grammars, while nobody waits.
        gc.disable()
        gc.collect()
        gc.freeze()
        sink.write(frame(b""))
        sink.flush()
        while (payload := read_frame(source)) is not None:
            spec, cpu_s = msgspec.msgpack.decode(payload, type=tuple[GrammarSpec | PatternSet, float])
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # CPU time: a busy machine refuses no grammar
            compiled = answer(spec)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sink.write(frame(msgspec.msgpack.encode(compiled)))
            sink.flush()
            del spec, compiled, payload
            gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]))
