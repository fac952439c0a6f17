"""Tensor parallelism as compiled for H200s, and what follows from it: `PYTHONPATH=.venv/h200 python -m bench.tp`.

Needs no GPU: XLA's CUDA plugin compiles for them anywhere (`make test-h200` fetches it). What is counted is exact:
collectives, their bytes, memory of one device. Times are a model's (`bench/tp/interconnect.py`), not measured.
"""

from bench.h200.plugin import use_plugin

use_plugin()  # before anything imports JAX

from bench.tp.run import main  # noqa: E402

if __name__ == "__main__":
    main()
