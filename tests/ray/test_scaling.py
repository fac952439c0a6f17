"""Options, and how many replicas autoscaling asks for."""

import pytest
from pydantic import ValidationError

from jsg.ray.options import Options
from jsg.ray.scaling import LoadPolicy, load_of, parse_scrape


def test_more_replicas_for_waiting_requests_and_full_pools_and_fewer_for_empty_ones():
    wanted = LoadPolicy(waiting=8, kv_usage=0.7).wanted
    assert wanted(2, [0, 0], [0.7, 0.7]) == 2 and wanted(2, [1, 0], [0.1, 0.1]) == 3
    assert wanted(2, [17, 0], [0.9, 0.9]) == 5 and wanted(4, [0] * 4, [0.9, 0.9, 0.9, 0.8]) == 5
    assert wanted(4, [0] * 4, [0.1] * 4) == 1
    assert wanted(4, [], []) == 4  # nothing is known yet


def test_a_scrape():
    text = (
        'jsg:cache_info{block_size="16",num_pages="8",page_size="4"} 1.0\n# HELP jsg:kv_usage x\n'
        'jsg:kv_usage 0.25\njsg:requests_waiting 3.0\njsg:dp_up{engine="0"} 1.0\n'
    )
    values = parse_scrape(text)
    assert values == {"page_size": 4, "jsg:kv_usage": 0.25, "jsg:requests_waiting": 3}
    assert load_of(values) == {"waiting": 3, "kv_usage": 0.25}


def test_options_are_what_the_command_line_gives():
    options = Options.model_validate({"model": "DIR", "replicas": "2..8", "tp": "4", "hosts": "2", "python": "python"})
    assert (options.bounds, options.num_gpus) == ((2, 8), 2)
    assert Options(model="DIR", replicas="3").bounds == (3, 3)
    follower = options.command(1, "10.0.0.1", 30000, 20000)
    assert follower[:5] == ["python", "-m", "jsg.cli", "serve", "DIR"]
    assert " ".join(follower).endswith("--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:20000")


def test_wrong_options_say_what_is_wrong():
    for name, value, message in (
        ("replicas", "0", "LEAST..MOST"),
        ("replicas", "3..2", "LEAST..MOST"),
        ("hosts", "3", "hosts must divide tp"),
        ("replica", "3", "Extra inputs"),
    ):
        with pytest.raises(ValidationError, match=message):
            Options.model_validate({"model": "DIR", name: value})
