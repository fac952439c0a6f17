"""Which model answers an example: the embedded one unless the command line names another."""

import argparse
from collections.abc import Callable

import jsg as sgl


def run(main: Callable[[], None]) -> None:
    """Runs an example against what the command line asks for."""
    parser = argparse.ArgumentParser()
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--model", default="tiny", help="directory or hub name; default: the embedded model")
    where.add_argument("--url", help="a server of `jsg serve`, such as http://127.0.0.1:30000")
    where.add_argument("--openai", metavar="MODEL", help="a model of OpenAI's API; the key is in OPENAI_API_KEY")
    options = parser.parse_args()
    if options.url:
        sgl.set_default_backend(sgl.RuntimeEndpoint(options.url))
        main()
    elif options.openai:
        sgl.set_default_backend(sgl.OpenAI(options.openai))
        main()
    else:
        with sgl.Engine(options.model) as engine:
            sgl.set_default_backend(engine)
            main()
