"""How XLA calls a kernel for CPUs, by its typed FFI (`xla/ffi/api/c_api.h` 0.x), and how threads share the work.

A kernel is a number of *items*, which any thread can compute in any order. The thread that XLA calls asks XLA's own
pool for helpers, takes items like them until none is left, and waits for those that helpers still compute. So no more
threads compute than XLA has, and a helper that comes late finds nothing to do and keeps nobody waiting.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from jsg.kernels_pallas.native.emit import INT, INT32, POINTER, Function, Value

VERSION = (0, 1)
"""The version of the interface that is used here: the oldest that has all of it."""
EXECUTE = 3
METADATA_EXTENSION = 1

# Byte offsets in the structures of c_api.h. Each begins with its size and a pointer to extensions.
EXTENSIONS = 8
FRAME_API, FRAME_CONTEXT, FRAME_STAGE, FRAME_ARGUMENTS, FRAME_RESULTS = 16, 24, 32, 72, 112
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS = 24, 28, 32
BUFFER_DATA, BUFFER_SIZES = 24, 40
API_DESTROY_ERROR, API_SCHEDULE, API_NUM_THREADS = 64, 136, 144
DESTROY_ERROR_BYTES, SCHEDULE_BYTES, NUM_THREADS_BYTES = 24, 40, 32

# A job is what the threads of one call share: counters in cache lines of their own, then an address for each buffer and
# a number for each of its axes.
JOB_NEXT, JOB_DONE, JOB_USERS, JOB_BUFFERS = 0, 64, 128, 192
SPINS_BEFORE_YIELD = 2000


class Buffer(NamedTuple):
    """An argument or a result of a call.

    Attributes:
        data: The address of its first number. Numbers lie in row-major order.
        sizes: The length of each axis.
    """

    data: Value
    sizes: list[Value]


class Kernel(NamedTuple):
    """What `emit_handler` needs.

    Attributes:
        name: The name under which XLA knows it.
        ranks: The number of axes of each argument and then of each result.
        num_results: How many of them are results.
        num_items: Emits the number of items of a call.
        prepare: Emits what the calling thread does before the items.
        item: Emits the computation of one item.
    """

    name: str
    ranks: Sequence[int]
    num_results: int
    num_items: Callable[[Function, list[Buffer]], Value]
    item: Callable[[Function, list[Buffer], Value], None]
    prepare: Callable[[Function, list[Buffer]], None] | None = None


def emit_handler(module: ir.Module, kernel: Kernel) -> None:
    """Emits the function `kernel.name` that XLA calls."""
    item = Function(module, f"{kernel.name}_item", [POINTER, INT])
    job, index = item.arguments
    kernel.item(item, buffers_of(item, kernel.ranks, job), index)
    item.builder.ret_void()
    work = _emit_work(module, kernel.name, item)
    handler = Function(module, kernel.name, [POINTER], POINTER)
    (frame,) = handler.arguments
    nothing = ir.Constant(POINTER, None)
    extension = handler.load(POINTER, frame, EXTENSIONS)
    with handler.when(_is_address(handler, extension)):
        _answer_metadata(handler, extension)
        handler.builder.ret(nothing)
        _unreachable(handler)
    stage = handler.load(INT32, frame, FRAME_STAGE)
    with handler.when(Value(handler, handler.builder.icmp_signed("!=", stage.ir, ir.Constant(INT32, EXECUTE)))):
        handler.builder.ret(nothing)
        _unreachable(handler)
    num_arguments = len(kernel.ranks) - kernel.num_results
    job = _emit_job(handler, kernel.ranks, frame, num_arguments)
    buffers = buffers_of(handler, kernel.ranks, job)
    if kernel.prepare is not None:
        kernel.prepare(handler, buffers)
    _share(handler, frame, job, kernel.num_items(handler, buffers), work)
    handler.builder.ret(nothing)


def _unreachable(function: Function) -> None:
    """Begins a block behind a return, because `if_then` wants to leave one."""
    function.builder.position_at_end(function.builder.append_basic_block("never"))


def _answer_metadata(handler: Function, extension: Value) -> None:
    """XLA asks each handler once which version of the interface it speaks. Other questions get no answer."""
    with handler.when(handler.load(INT32, extension, EXTENSION_TYPE).equals(METADATA_EXTENSION)):
        metadata = handler.load(POINTER, extension, EXTENSION_METADATA)
        for offset, number in ((METADATA_MAJOR, VERSION[0]), (METADATA_MINOR, VERSION[1]), (METADATA_TRAITS, 0)):
            handler.store(Value(handler, ir.Constant(INT32, number)), metadata, offset)


def _emit_job(handler: Function, ranks: Sequence[int], frame: Value, num_arguments: int) -> Value:
    """A job with what the frame says of the buffers. Its counters are set when the work is shared."""
    num_bytes = JOB_BUFFERS + sum(8 * (1 + rank) for rank in ranks)
    allocate = handler.external("malloc", ir.FunctionType(POINTER, [INT]))
    job = Value(handler, handler.builder.call(allocate, [ir.Constant(INT, num_bytes)]))
    arguments, results = (handler.load(POINTER, frame, offset) for offset in (FRAME_ARGUMENTS, FRAME_RESULTS))
    offset = JOB_BUFFERS
    for number, rank in enumerate(ranks):
        is_argument = number < num_arguments
        where = 8 * (number if is_argument else number - num_arguments)
        buffer = handler.load(POINTER, arguments if is_argument else results, where)
        handler.store(handler.load(POINTER, buffer, BUFFER_DATA), job, offset)
        sizes = handler.load(POINTER, buffer, BUFFER_SIZES)
        for axis in range(rank):
            handler.store(handler.load(INT, sizes, 8 * axis), job, offset + 8 * (1 + axis))
        offset += 8 * (1 + rank)
    return job


def buffers_of(function: Function, ranks: Sequence[int], job: Value) -> list[Buffer]:
    """The buffers of a job."""
    buffers, offset = [], JOB_BUFFERS
    for rank in ranks:
        sizes = [function.load(INT, job, offset + 8 * (1 + axis)) for axis in range(rank)]
        buffers.append(Buffer(function.load(POINTER, job, offset), sizes))
        offset += 8 * (1 + rank)
    return buffers


def _emit_work(module: ir.Module, name: str, item: Function) -> Function:
    """The loop of a thread: it takes items until none is left. The last user of a job frees it."""
    work = Function(module, f"{name}_work", [POINTER, INT])
    job, num_items = work.arguments
    again = work.builder.append_basic_block("again")
    take, leave = (work.builder.append_basic_block(block) for block in ("take", "leave"))
    work.builder.branch(again)
    work.builder.position_at_end(again)
    index = _add(work, job, JOB_NEXT, 1)
    work.builder.cbranch((index < num_items).ir, take, leave)
    work.builder.position_at_end(take)
    work.call(item, job, index)
    _add(work, job, JOB_DONE, 1)
    work.builder.branch(again)
    work.builder.position_at_end(leave)
    work.builder.ret_void()
    helper = Function(module, f"{name}_helper", [POINTER])
    (job,) = helper.arguments
    helper.call(work, job, helper.load(INT, job, JOB_NEXT + 8))
    _leave(helper, job)
    helper.builder.ret_void()
    return work


def _share(handler: Function, frame: Value, job: Value, num_items: Value, work: Function) -> None:
    """Computes all items of a job with the threads of XLA's pool."""
    num_threads = _num_threads(handler, frame)
    wanted = handler.chosen(num_items < num_threads, num_items, num_threads)
    wanted = handler.chosen(wanted < 1, handler.constant(1), wanted)
    for offset in (JOB_NEXT, JOB_DONE):
        handler.store(handler.constant(0), job, offset)
    handler.store(num_items, job, JOB_NEXT + 8)
    handler.store(wanted, job, JOB_USERS)
    helper = handler.module.globals[work.ir.name.removesuffix("_work") + "_helper"]
    with handler.loop(wanted, start=1):
        _schedule(handler, frame, helper, job)
    handler.call(work, job, num_items)
    _wait(handler, job, num_items)
    _leave(handler, job)


def _num_threads(handler: Function, frame: Value) -> Value:
    """How many threads XLA's pool has; 1 if it has none."""
    answer = handler.buffer(8)
    handler.store(handler.constant(1), answer)
    context = handler.load(POINTER, frame, FRAME_CONTEXT)
    _ask(handler, frame, API_NUM_THREADS, NUM_THREADS_BYTES, context, answer)
    return handler.load(INT, answer)


def _schedule(handler: Function, frame: Value, helper: ir.Function, job: Value) -> None:
    """Asks the pool to run a helper. If it cannot, the helper's part is given up at once."""
    context = handler.load(POINTER, frame, FRAME_CONTEXT)
    task = Value(handler, handler.builder.bitcast(helper, POINTER))
    with handler.when(_ask(handler, frame, API_SCHEDULE, SCHEDULE_BYTES, context, task, job)):
        _add(handler, job, JOB_USERS, -1)


def _ask(handler: Function, frame: Value, offset: int, num_bytes: int, *fields: Value) -> Value:
    """Calls one of XLA's functions with a structure of these fields. Says whether it failed; the error is destroyed."""
    error = _called(handler, frame, offset, POINTER, num_bytes, *fields)
    failed = _is_address(handler, error)
    with handler.when(failed):
        _called(handler, frame, API_DESTROY_ERROR, ir.VoidType(), DESTROY_ERROR_BYTES, error)
    return failed


def _called(handler: Function, frame: Value, offset: int, result: ir.Type, num_bytes: int, *fields: Value) -> Value:
    request = handler.buffer(num_bytes)
    handler.store(handler.constant(num_bytes), request)
    handler.store(Value(handler, ir.Constant(POINTER, None)), request, EXTENSIONS)
    for number, field in enumerate(fields, start=2):
        handler.store(field, request, 8 * number)
    kind = ir.FunctionType(result, [POINTER])
    function = handler.load(POINTER, handler.load(POINTER, frame, FRAME_API), offset)
    pointer = handler.builder.bitcast(function.ir, kind.as_pointer())
    return Value(handler, handler.builder.call(pointer, [request.ir]))


def _is_address(handler: Function, address: Value) -> Value:
    return Value(handler, handler.builder.icmp_unsigned("!=", address.ir, ir.Constant(POINTER, None)))


def _wait(handler: Function, job: Value, num_items: Value) -> None:
    """Spins until all items are done, and lets other threads run if that takes long."""
    again, pause, done = (handler.builder.append_basic_block(block) for block in ("wait", "pause", "done"))
    before = handler.builder.block
    handler.builder.branch(again)
    handler.builder.position_at_end(again)
    spins = handler.builder.phi(INT)
    spins.add_incoming(ir.Constant(INT, 0), before)
    finished = handler.builder.load_atomic(
        handler.builder.bitcast(handler.address(job, JOB_DONE).ir, INT.as_pointer()), "acquire", 8
    )
    handler.builder.cbranch(handler.builder.icmp_signed("<", finished, num_items.ir), pause, done)
    handler.builder.position_at_end(pause)
    more = handler.builder.add(spins, ir.Constant(INT, 1))
    with handler.when(Value(handler, handler.builder.icmp_signed(">", more, ir.Constant(INT, SPINS_BEFORE_YIELD)))):
        handler.builder.call(handler.external("sched_yield", ir.FunctionType(INT32, [])), [])
    spins.add_incoming(more, handler.builder.block)
    handler.builder.branch(again)
    handler.builder.position_at_end(done)


def _leave(function: Function, job: Value) -> None:
    """Gives up a thread's use of a job."""
    with function.when(_add(function, job, JOB_USERS, -1).equals(1)):
        function.builder.call(function.external("free", ir.FunctionType(ir.VoidType(), [POINTER])), [job.ir])


def _add(function: Function, job: Value, offset: int, number: int) -> Value:
    """Changes a counter, and gives what it was before."""
    counter = function.builder.bitcast(function.address(job, offset).ir, INT.as_pointer())
    return Value(function, function.builder.atomic_rmw("add", counter, ir.Constant(INT, number), "acq_rel"))
