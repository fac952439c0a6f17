"""Options are checked when they are made, and errors have the name that the user typed."""

import dataclasses
from pathlib import Path

import pytest

from jsg.cli import command_line
from jsg.config import EngineConfig, ServerConfig
from jsg.errors import ConfigError
from jsg.option_sources import read_options


@pytest.mark.parametrize(
    ("knobs", "option"),
    [
        ({"page_size": 1.5}, "--page-size"),
        ({"page_size": "16"}, "--page-size"),
        ({"page_size": True}, "--page-size"),
        ({"page_size": 0}, "--page-size"),
        ({"max_running_requests": 4.5}, "--max-running-requests"),
        ({"max_running_requests": 0}, "--max-running-requests"),
        ({"disable_radix_cache": "no"}, "--disable-radix-cache"),
        ({"disable_radix_cache": 1}, "--disable-radix-cache"),
        ({"mem_fraction_static": 1.1}, "--mem-fraction-static"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static"),
        ({"schedule_policy": "sjf"}, "--schedule-policy"),
        ({"dtype": "int8"}, "--dtype"),
        ({"load_format": "gguf"}, "--load-format"),
        ({"model_path": None}, "--model-path"),
        ({"tp_size": 0}, "--tp-size"),
        ({"tp_size": 65}, "--tp-size"),
        ({"tp_size": True}, "--tp-size"),
        ({"ep_size": 0}, "--ep-size"),
        ({"ep_size": 2.0, "tp_size": 2}, "--ep-size"),
        ({"context_length": 0}, r"--context-length must be in \[1, 2147483647\], but got 0"),
        ({"queue_timeout": 0.0}, "--queue-timeout must be in"),
        ({"queue_timeout": "5"}, "--queue-timeout must be of type float, but got '5'"),
        ({"max_bypass_tokens": -1}, "--max-bypass-tokens"),
        ({"vision_cache_size": 2**21}, "--vision-cache-size"),
        ({"quantization": "int3"}, "--quantization must be one of none, int8, fp8, int4, but got 'int3'"),
        ({"node_rank": 1}, r"--node-rank must be in \[0, 0\]"),
        ({"ep_size": 2}, "--ep-size must divide --tp-size, which is 1"),
        ({"ep_size": 3, "tp_size": 4}, "--ep-size must divide --tp-size, which is 4"),
    ],
)
def test_a_wrong_knob_is_named(knobs: dict, option: str):
    with pytest.raises(ConfigError, match=option):
        EngineConfig(**knobs)


def test_a_wrong_knob_of_the_server_is_named():
    for knobs, option in (
        ({"port": 70_000}, "--port"),
        ({"port": "80"}, "--port"),
        ({"host": 1}, "--host"),
        ({"dp_size": 0}, "--dp-size"),
        ({"request_timeout": 0}, "--request-timeout"),
        ({"metrics_alias": "tgi"}, "--metrics-alias must be one of sglang, vllm"),
        ({"max_image_pixels": 2**27}, "--max-image-pixels"),
        ({"api_key": (1,)}, "--api-key must be of type str"),
    ):
        with pytest.raises(ConfigError, match=option):
            ServerConfig(**knobs)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_help_text_is_whole_sentences(config: type):
    for field in dataclasses.fields(config):
        text = field.metadata["help"]
        assert text[0].isupper() and text.endswith("."), field.name
        is_given = field.name in ("api_key_file", "admin_api_key")  # without them there is no such key
        assert "Default:" in text or field.default not in (None, ()) or is_given, field.name


def test_an_integer_will_do_for_a_fraction():
    assert EngineConfig(mem_fraction_static=1, context_length=128).mem_fraction_static == 1


@pytest.mark.parametrize("name", ["front-processes", "api-server-count", "tokenizer-worker-num"])
@pytest.mark.parametrize(("given", "value"), [("3", 3), ("auto", None)])
def test_an_option_has_the_names_of_other_servers_and_auto(tmp_path: Path, name: str, given: str, value: int | None):
    assert command_line().parse_args(["serve", f"--{name}", given]).front_processes == value
    file = tmp_path / "options.yaml"
    file.write_text(f"{name}: {given}\n")
    assert read_options(file) == {"front_processes": value}
