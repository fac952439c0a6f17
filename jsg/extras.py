"""Packages that only some features need: the extras of `pyproject.toml` that errors of jsg name."""

EXTRAS = {
    "anthropic": "anthropic",
    "cuda": "'jax[cuda13]'",
    "openai": "openai",
    "otel": "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    "tpu": "'jax[tpu]'",
    "video": "av",
}
"""Name → what the extra brings, as a shell reads it."""


def install_command(extra: str) -> str:
    """The command that installs an extra into the environment of jsg, wherever jsg itself was installed from."""
    return f"pip install {EXTRAS[extra]}"
