"""Knobs are checked where they are made, by the name the user typed."""

import pytest

from jsg.config import EngineConfig, ServerConfig
from jsg.errors import ConfigError


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
    ):
        with pytest.raises(ConfigError, match=option):
            ServerConfig(**knobs)


def test_an_integer_will_do_for_a_fraction():
    assert EngineConfig(mem_fraction_static=1, context_length=128).mem_fraction_static == 1
