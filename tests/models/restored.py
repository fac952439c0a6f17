"""How orbax by itself shares a checkpoint out over two devices: `python -m tests.models.restored DIRECTORY`."""

import json
import sys

import jax
import orbax.checkpoint as ocp


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(sys.argv[1])
    json.dump({name: list(array.sharding.spec) for name, array in restored.items()}, sys.stdout)


if __name__ == "__main__":
    main()
