"""Compiles models for several H200s and calculates their speed: `PYTHONPATH=.venv/nvidia python -m bench.tp`.

It needs no GPU, because XLA's CUDA plugin compiles for GPUs anywhere (`make test-nvidia` fetches it). The counts of
collectives, their bytes and the memory of one device are exact. Times are calculated (`bench/tp/interconnect.py`) and
not measured.
"""

from bench.nvidia.plugin import use_plugin

use_plugin()  # before anything imports JAX

from bench.tp.run import main  # noqa: E402

if __name__ == "__main__":
    main()
