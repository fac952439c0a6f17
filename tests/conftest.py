"""What tests share: the CPU, no network, one compile cache, hypothesis without randomness, `--shared-data`, figures.

The environment is set before anything imports JAX, so that this process and its children agree.
"""

import contextlib
import gc
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from jsg.config import KEY_VARIABLES
from tests.parity import RECORDS, Parity, read, write

ROOT = pathlib.Path(__file__).parent.parent
COMPILE_CACHE = ROOT / ".cache" / "jax"
MAPPINGS = pathlib.Path("/proc/self/maps")
MANY_MAPPINGS = 20_000

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that wants the network is wrong
for variable in KEY_VARIABLES.values():
    os.environ.pop(variable, None)  # else the servers of tests would need it
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else `tokenizers` warns after a fork
COMPILE_CACHE.mkdir(parents=True, exist_ok=True)
COMPILE_CACHE.chmod(0o700)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILE_CACHE)
KERNEL_CACHE = COMPILE_CACHE / "numba"  # where an engine with this cache keeps the kernels of grammars
KERNEL_CACHE.mkdir(mode=0o700, exist_ok=True)
os.environ["NUMBA_CACHE_DIR"] = str(KERNEL_CACHE)
MIN_COMPILE_S = 0.1
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(MIN_COMPILE_S)
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(4 * 2**30)  # only a bounded cache is locked between processes

ELSEWHERE = {"nvidia": "XLA's CUDA plugin", "tpu": "libtpu"}
"""Folders of tests that compile for devices that are not here, and what they need, which lies outside the environment.
They run in processes of their own with the option of their name, and are skipped without it."""
FAST = "not slow"
"""Which tests `-m` chooses where it says nothing else: see `addopts` in `pyproject.toml`."""
COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=1",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
"""For XLA. The programs are the same to the last operation, and their machine code is nearly as fast. It takes half the
time to compile them. Without any optimisation it takes a quarter, but then tests of long traffic take twice as long."""

pytest_plugins = ["tests.cpu_times", "tests.shape_checker"]

hypothesis.settings.register_profile("jsg", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jsg")
# Else it reads the source of every module that is loaded, which takes seconds, and mixes the constants that it finds
# into its examples: they would be others when a file of tests runs alone.
providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shared-data",
        metavar="DIR",
        type=pathlib.Path,
        help="folder of the data sets that are too large for the repository; with it, missing data fails a test",
    )
    parser.addoption(
        "--record-parity", action="store_true", help="write the figures of the tests that ran to tests/parity.json"
    )
    for folder, compiler in ELSEWHERE.items():
        text = f"run tests/{folder}, which compile for devices that are not here; without {compiler}, fail"
        parser.addoption(f"--{folder}", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--shared-data")
    if folder is not None and not folder.is_dir():
        raise pytest.UsageError(f"--shared-data must name a folder that exists, but got {str(folder)!r}")
    if config.getoption("numprocesses", default=None):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each worker and its processes compile every module anew
    if FAST in config.getoption("markexpr") and not any(map(config.getoption, ELSEWHERE)):
        _prepare_cheaply()


def _prepare_cheaply() -> None:
    """Leaves out of this process, its workers and the processes of tests what fast tests need not pay for.

    The slow tests compile as a server does, so the machine code that serves is tested too.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()  # a worker has those of the process that started it
    os.environ["XLA_FLAGS"] = " ".join((*(flag for flag in flags if flag not in COMPILE_QUICKLY), *COMPILE_QUICKLY))
    # No fast test speaks to a real server over TLS, and each client would read all certificates of this machine.
    nobody = COMPILE_CACHE / "no-certificates"
    nobody.mkdir(mode=0o700, exist_ok=True)
    os.environ["SSL_CERT_DIR"] = str(nobody)
    os.environ.pop("SSL_CERT_FILE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Begins the files of tests at another place in each worker, so that each compiles a part and reads the rest.

    All workers must collect all files. In the same order, each of them would rewrite and compile every file anew.
    What collecting makes lives to the end, so the garbage collector would look through it for nothing: for 1.5 s.
    """
    gc.disable()
    workers = getattr(session.config, "workerinput", None)
    if workers is not None and session.config.args == session.config.getini("testpaths"):
        own, of = int(workers["workerid"].removeprefix("gw")), workers["workercount"]
        files = sorted(file for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name not in ELSEWHERE)
        for file in files[len(files) * own // of : len(files) * (own + 1) // of]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # which pytest reports when it imports the file
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Where all tests are collected, those of `ELSEWHERE` would be imported and skipped one by one, in each worker."""
    folder = collection_path.parent.name
    if folder not in ELSEWHERE or config.getoption(folder) or config.args != config.getini("testpaths"):
        return None
    return True if collection_path.suffix == ".py" else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what reads large data sets as slow, and puts the soak first. It is long: another worker runs the rest."""
    left_out = {str(ROOT / "tests" / folder): folder for folder in ELSEWHERE if not config.getoption(folder)}
    for item in items:
        if folder := left_out.get(os.path.dirname(item.path)):  # comparing paths takes 50 times as long as text
            item.add_marker(pytest.mark.skip(reason=f"compiled for devices that are not here by `make test-{folder}`"))
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.name not in ("test_half_a_minute", "test_three_minutes"))


def pytest_collection_finish() -> None:
    """Takes what collecting made out of the garbage collector. It lives to the end, and collections take 0.4 s less."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Makes writes to the compile cache cheap in this process.

    An engine of an earlier test may have set that every program is kept, however small. And before each write JAX adds
    up the sizes of all files of the cache, at 0.1 ms for each: a run would pay a minute. So only the processes that
    tests start, which this does not reach, see to it that the cache does not grow without end.
    """
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
        importlib.import_module("jax._src.lru_cache").LRUCache._evict_if_needed = lambda *_, **__: None


@pytest.hookimpl(trylast=True)  # when the fixtures of the file are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file of tests, frees what JAX compiled, if that is much.

    Each program has dozens of memory mappings, and where a process reaches the 65530 that Linux allows LLVM aborts it.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    if (jax := sys.modules.get("jax")) and num_mappings() > MANY_MAPPINGS:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def num_mappings() -> int:
    """The number of memory mappings of this process; 0 if the system does not give it."""
    return len(MAPPINGS.read_bytes().splitlines()) if MAPPINGS.exists() else 0


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing_open() -> Iterator[None]:
    """Finds connections that were never closed in the file that left them, and not in one that runs later.

    What lives on, such as compiled programs, leaves the garbage collector: else each collection would visit all of it
    again, which takes half a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The library whose event loop runs the tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def shared_data(request: pytest.FixtureRequest) -> Callable[[str], pathlib.Path]:
    """Finds a data set by its name: skips without `--shared-data`, fails when the folder lacks it."""
    folder = request.config.getoption("--shared-data")

    def find(name: str) -> pathlib.Path:
        if folder is None:
            pytest.skip(f"needs {name}: give its folder with --shared-data=DIR")
        path = folder.resolve() / name
        if not path.exists():
            pytest.fail(f"--shared-data has no {name}", pytrace=False)
        return path

    return find


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Iterator[Parity]:
    """Takes the figure of a comparison with another implementation; see `parity.py`."""
    measured = Parity(request.node.nodeid, [])
    yield measured
    if request.config.getoption("--record-parity"):
        write(measured.found, instead_of=read() if RECORDS.exists() else [])


@pytest.fixture(scope="session")
def compile_cache_dir() -> str:
    """The owner-only directory of compiled programs that all tests and runs share."""
    return str(COMPILE_CACHE)
