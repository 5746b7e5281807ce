"""What decoding asks of CPU cores is of the examples as training takes them."""

from types import SimpleNamespace

import numpy as np
import pytest

from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, language_model, multimodal, vit
from motet.cost.catalogue import cluster
from motet.cost.decoding import DecodingCost
from motet.cost.profile import DecodingTimes
from motet.data.media import IMAGE, MediaRef
from motet.planning.decoding import DecodingNeed, core_seconds

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
    assert core_seconds(examples, A_SECOND, weight) == {IMAGE: pytest.approx(0.5, abs=0.01)}
    assert core_seconds(dataset([True, False]), A_SECOND) == {IMAGE: pytest.approx(0.5)}


def test_ranks_that_compute_the_same_items_decode_each():
    """Those that share products, and each stage with a copy of an encoder."""
    toy = multimodal(
        "toy",
        language_model(Transformer(64, 256, num_heads=4), 4, 1000),
        [vit("image", Transformer(32, 64, num_heads=4), 2)],
    )
    need = DecodingNeed({"image": 2.0}, workers=2, kind="workers")
    whole = {"image": 2, "backbone": 4}
    halves = ({"backbone": 2}, {"backbone": 2})
    for unit, core_s in (
        (Unit("all", (whole,), dp=4), 2.0),
        (Unit("all", (whole,), dp=2, tp=2), 4.0),
        (Unit("llm", halves, pp=2, tp=2, replicated=("image",)), 8.0),
    ):
        plan = Plan(toy, cluster("H100", 1, 4), (unit,), batch_size=4)
        load = need.load(1.0, plan)
        assert (load.core_s, load.num_workers) == (core_s, 8)
