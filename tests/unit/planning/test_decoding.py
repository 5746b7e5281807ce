"""What decoding asks of CPU cores is of the examples as training takes them."""

from types import SimpleNamespace

import numpy as np
import pytest

from motet.cost.decoding import DecodingCost
from motet.cost.profile import DecodingTimes
from motet.data.media import IMAGE, MediaRef
from motet.planning.decoding import core_seconds

IMAGES = MediaRef(IMAGE, "a.png", raw=(100, 100))
A_SECOND = DecodingCost([DecodingTimes(phase=IMAGE, codec=".png", amounts=(1e4, 2e4), seconds=(1.0, 1.0))])


def dataset(has_image):
    return SimpleNamespace(
        num_examples=len(has_image),
        media_refs=lambda number: [IMAGES] if has_image[number] else [],
        readers_of=lambda ref: (IMAGE,),
    )


@pytest.mark.parametrize("num_text", [3, 6000])
def test_examples_count_as_often_as_they_are_taken(num_text):
    # One example with an image among many of text, and it is taken in half of all cases.
    examples = dataset([True] + [False] * num_text)
    weight = np.array([num_text] + [1] * num_text, dtype=float)
    assert core_seconds(examples, A_SECOND, weight) == pytest.approx(0.5, abs=0.01)
    assert core_seconds(dataset([True, False]), A_SECOND) == pytest.approx(0.5)
