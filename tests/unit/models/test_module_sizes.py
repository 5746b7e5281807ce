"""What sizes of items say of their path through a module: segments of the encoder's, or of what callbacks make."""

import numpy as np
import pytest

from motet.core.item_segments import ItemSegments
from unit.models.test_module import Custom, module_of


def test_segments_are_those_of_the_encoder_or_of_the_hook_that_cuts():
    class Windowed(Custom):
        def segments(self, sizes):
            return ItemSegments.cut(np.prod(sizes, axis=1), 6)

    sizes = np.array([[4, 4], [2, 1]])
    assert module_of(Custom()).segments(sizes) is None
    windows = module_of(Windowed())
    assert windows.segments(sizes).length.tolist() == [6, 6, 4, 2]
    assert windows.lengths(sizes).tolist() == [16, 2]
    # A hook may compute more than the item has: a thumbnail beside the tiles.
    tiles = module_of(Windowed(), cut=lambda sizes: ItemSegments.of([[8, 8, 4]] * len(sizes)))
    assert tiles.lengths(sizes).tolist() == [20, 20]


@pytest.mark.parametrize(("encoder", "segments"), [("Custom", [4, 4, 8]), ("Windowed", [3, 1, 3, 1, 3, 3, 2])])
def test_what_a_callback_makes_of_an_item_are_its_segments(encoder, segments):
    class Windowed(Custom):
        def segments(self, sizes):
            return ItemSegments.cut(np.prod(sizes, axis=1), 3)

    def tiles(values, sizes):
        raise AssertionError("lengths follow from sizes alone")

    # The first image becomes two tiles, the second stays one.
    tiles.items = lambda sizes: (np.array([[2, 2], [2, 2], [4, 2]]), np.array([2, 1]))
    module = module_of({"Custom": Custom, "Windowed": Windowed}[encoder](), before=tiles)
    found = module.segments(np.array([[4, 2], [4, 2]]))
    assert found.length.tolist() == segments
    assert module.lengths(np.array([[4, 2], [4, 2]])).tolist() == [8, 8]
