"""All programs compiled into a folder on the device itself, and a start that only reads them.

It is what `jsg compile` and `jsg serve --programs` do, in these processes, so that no package of the server is needed.
"""

import dataclasses

from bench.device.engine import first_answer_s, make_config
from bench.device.events import Part
from jsg.engine.child.protocol import Progress
from jsg.engine.core import EngineCore
from jsg.engine.precompile import precompile

PROGRAMS = "programs"


def write(part: Part) -> None:
    """Compiles and writes every program. No weight is loaded."""
    folder, last = part.folder / PROGRAMS, Progress("", 0, 0)

    def note(progress: Progress) -> None:
        nonlocal last
        last = progress

    begin = part.age_s
    precompile(make_config(part, chunk=None, cache="unused"), folder, note)
    facts = {"num_programs": last.total, "num_bytes": sum(file.stat().st_size for file in folder.iterdir())}
    part.add("all programs compiled and written", "s", [part.age_s - begin], kind="compile", **facts)


def start(part: Part) -> None:
    """Starts an engine with them: time to the first answer, and how many programs it compiled all the same."""
    config = make_config(part, chunk=None, cache="unused")
    config = dataclasses.replace(config, programs=str(part.folder / PROGRAMS), disable_compilation_cache=True)
    core = EngineCore(config)
    ready_s = part.age_s
    answer_s = first_answer_s(part, core)
    stats = core.stats()
    core.close()
    facts = {name: stats[name] for name in ("num_lowered", "num_compiled", "num_loaded")}
    name = "start of process to first answer, with compiled programs"
    part.add(name, "s", [answer_s], kind="programs", ready_s=round(ready_s, 2), **facts)
