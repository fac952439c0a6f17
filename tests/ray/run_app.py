"""Runs the application on a small cluster of this machine until it is told to end: `run_app.py PORT NAME=VALUE ...`.

It needs Ray, so it runs in the environment that `make test-long` makes for it.
"""

import signal
import sys

import ray
from ray import serve

from jsg.ray.app import build
from jsg.ray.options import Options


def main(port: int, arguments: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    options = Options.model_validate(dict(argument.split("=", 1) for argument in arguments))
    ray.init(num_cpus=16, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(options), name="jsg", route_prefix="/")
    print("READY", flush=True)
    while signal.sigwait({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}) == signal.SIGUSR1:  # scales down
        serve.run(build(options.model_copy(update={"replicas": "1"})), name="jsg", route_prefix="/")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
