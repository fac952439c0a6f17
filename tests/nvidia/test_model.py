"""A row of the table of modelled speeds, from a compile."""

from bench.nvidia import model
from bench.nvidia.estimate import Estimate, Load
from bench.nvidia.work import Kind


def test_a_row_is_modelled_from_launches_of_the_program():
    estimate, key = Estimate("h200", "8B"), model.decode_key(32)
    two = estimate.compiled(key, 2)
    kinds = [work.kind for work in two.works]
    assert len(kinds) == two.num_launches, "every launch has its work"
    assert (kinds.count(Kind.PRODUCT), kinds.count(Kind.ATTENTION)) == (4 * 2 + 1, 2)
    assert sum(work.kernel_bytes for work in two.works) == 2 * (2 * 218_103_808 + 4096 * 128_256)
    ms = 1e3 * estimate.seconds(key, Load(32, 1024))
    assert 0.9 < ms / 6.02 < 1.1, "as an H200 measured it: docs/performance.md"
