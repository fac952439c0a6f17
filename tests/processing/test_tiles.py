import pytest

from jsg.processing.tiles import best_resolution

PUBLISHED = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]


@pytest.mark.parametrize(
    ("size", "resolution"),
    [
        ((672, 672), (672, 672)),
        ((336, 1008), (336, 1008)),
        ((100, 200), (336, 672)),  # all keep it whole: the smallest
        ((100, 100), (336, 672)),  # and the first of equals
        ((3000, 2000), (672, 672)),
        ((3000, 900), (1008, 336)),
        ((4000, 1), (336, 672)),  # nothing is left of it in any
    ],
)
def test_most_pixels_are_kept_and_fewest_are_wasted(size, resolution):
    assert best_resolution(size, PUBLISHED) == resolution
