"""The grammar process: `python -m jsg.engine.child.grammar_process PID`, which only `grammar_workers.py` starts.

One loop: a grammar comes in on standard input, its tables or the reason why there are none go out on standard output,
each as a frame of a length and msgpack; an empty frame before all says that it is ready. It is a process because
compiling is Python and may take seconds: in a thread of the front or of the engine it would stop every stream. It knows
no vocabulary and keeps nothing between grammars.
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

from jsg.engine.child.parent import die_with_parent
from jsg.engine.child.protocol import Failure, GrammarAnswer, GrammarTask
from jsg.errors import GrammarError
from jsg.types import GrammarSpec

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<I")  # of a message to or from the process: the length of what follows
OUT_OF_TIME = signal.SIGPROF
"""What ends a process whose grammar takes more CPU time than it may. Ended and not interrupted: what an exception
leaves behind, which may come anywhere, is not to be compiled with."""
MEMORY_BYTES = 4 * 2**30
"""Address space at most. Fuel keeps a grammar far below; this is for the case that it fails to."""
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


def answer(spec: GrammarSpec) -> GrammarAnswer:
    """Compiles one grammar. Whatever goes wrong becomes a failure of that grammar."""
    from jsg.constrained.compiler import compile_tables

    try:
        return GrammarAnswer(tables=compile_tables(spec).to_bytes())
    except GrammarError as error:
        return GrammarAnswer(failure=Failure.of(error))
    except MemoryError:
        message = f"{spec.kind}: the grammar needs too much memory to compile; simplify it"
        return GrammarAnswer(failure=Failure.of(GrammarError(message, param=spec.kind)))
    except Exception:
        logger.exception("a grammar of kind %s could not be compiled", spec.kind)
        return GrammarAnswer(failure=Failure.of(GrammarError(BUG, param=spec.kind)))


def main(parent_pid: int) -> None:
    """Answers until the input ends."""
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # the front's to obey
        signal.signal(number, signal.SIG_IGN)
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with os.fdopen(os.dup(STDIN), "rb") as source, os.fdopen(os.dup(STDOUT), "wb") as sink:
        os.dup2(STDERR, STDOUT)  # whatever a library prints must not look like an answer
        from jsg.constrained.compiler import warm

        warm()  # so that the first grammar need not wait for it
        # A grammar is tens of thousands of small objects that live until its end: collecting among them takes a third
        # of the time. What one leaves behind is collected while nobody waits.
        gc.disable()
        gc.collect()
        gc.freeze()
        sink.write(frame(b""))
        sink.flush()
        while (payload := read_frame(source)) is not None:
            task = msgspec.msgpack.decode(payload, type=GrammarTask)
            signal.setitimer(signal.ITIMER_PROF, task.cpu_s)  # CPU time: a busy machine refuses no grammar
            compiled = answer(task.spec)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sink.write(frame(msgspec.msgpack.encode(compiled)))
            sink.flush()
            del task, compiled, payload
            gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]))
