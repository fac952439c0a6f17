"""A figure waits until an engine has compiled everything."""

from bench.settled import wait_until_compiled


def test_it_asks_until_nothing_is_left_to_compile():
    pending = [2, 1, 0, 0]
    wait_until_compiled(lambda: {"num_programs_pending": pending.pop(0)})
    assert pending == [0]
