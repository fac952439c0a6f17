"""The front process around a scripted engine: `python -m tests.server.fake_server JSON`. Ends with a line of JSON."""

import asyncio
import json
import logging
import sys
import threading
import time
from pathlib import Path

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.child.log import ServerLog
from jsg.engine.front.children import EngineChild
from jsg.errors import JsgError


def main(argument: str) -> int:
    knobs = json.loads(argument)
    engine, server = EngineConfig(**knobs["engine"]), ServerConfig(**knobs["server"])
    core = knobs.get("core", "tests.engine.fake_core:FakeCore")
    log = ServerLog(server.log_format, "front")
    children = [EngineChild.spawn(engine, core=core, name=f"engine-{number}") for number in range(server.dp_size)]
    from jsg.server.run import serve, serve_to_end

    if to_end := knobs.get("to_end", False):  # as `jsg serve` does, with a thread that is at work for ever
        threading.Thread(target=threading.Event().wait).start()
    status, directory = 0, Path(knobs["tokenizer_dir"])
    serving = (serve_to_end if to_end else serve)(
        engine, server, children, tokenizer_dir=directory, started_at=time.monotonic(), log=log
    )
    try:
        asyncio.run(serving)
    except JsgError as error:
        logging.error("%s", error)
        status = 2
    heavy = sorted(name for name in ("jax", "jaxlib", "flax", "transformers", "torch") if name in sys.modules)
    print(json.dumps({"heavy": heavy}))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
