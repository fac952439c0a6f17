"""Serves a GGUF file with llama.cpp: `PYTHON llama_server.py FILE PORT THREADS TOKENS ROWS [DRAFTS]`, until SIGTERM.

The interpreter of `--llama-python` runs this file, which imports nothing of jsg. Keys and values are float16, which is
llama.cpp's default, and all rows share one pool of them. DRAFTS is what `--spec-type` of llama.cpp's own server takes.
"""

import os
import signal
import sys
import threading

import xllamacpp  # pyright: ignore[reportMissingImports]


def main(path: str, port: str, num_threads: str, num_tokens: str, num_rows: str, drafts: str = "none") -> None:
    options = xllamacpp.CommonParams()
    options.model.path = path
    options.n_ctx, options.n_parallel, options.kv_unified = int(num_tokens), int(num_rows), True
    options.n_batch, options.n_ubatch = 2048, 512
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = int(num_threads)
    options.hostnames, options.port = ["127.0.0.1"], int(port)
    options.warmup = options.cont_batching = True
    kind = f"COMMON_SPECULATIVE_TYPE_{drafts.replace('-', '_').upper()}"
    options.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    server = xllamacpp.Server(options)
    print("listening at", server.listening_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # its destructor may wait for ever
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
