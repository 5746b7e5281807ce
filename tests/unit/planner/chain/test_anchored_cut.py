"""OmniBal's candidates against all there are, its splits against those that it prints, and cuts without seconds."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.shapes import Transformer, language_model, vit
from motet.cost.flops import layer_flops, work_of
from motet.planner import partition
from motet.planner.chain.anchored_cut import by_layers, by_parameters, cuts_near, fastest_cut, greedy_cut
from motet.planner.stages.blocks import blocks_of
from unit.planner.jobs import job

seconds = st.lists(st.integers(1, 9), min_size=4, max_size=10)


def metric(block_s, send_s, counts):
    bounds = np.cumsum([0, *counts])
    stages = [block_s[a:b].sum() for a, b in pairwise(bounds)]
    return np.std(stages) + sum(send_s[edge, end - 1] for edge, end in enumerate(bounds[1:-1]))


@given(seconds, st.integers(1, 4), st.integers(1, 2), st.randoms())
@settings(max_examples=80, deadline=None)
def test_the_candidates_are_the_best_of_all_within_the_radius(block_s, num_stages, radius, random):
    block_s = np.array(block_s, dtype=float)
    send_s = np.array([[random.randint(0, 3) for _ in block_s] for _ in range(num_stages - 1)]).reshape(
        -1, len(block_s)
    )
    start = greedy_cut(block_s, num_stages)
    assert sum(start) == len(block_s) and min(start) >= 1 and len(start) == num_stages
    ends = np.cumsum(start)[:-1]
    around = []
    for shift in product(range(-radius, radius + 1), repeat=num_stages - 1):
        counts = np.diff([0, *(ends + np.array(shift, dtype=int)), len(block_s)])
        if (counts >= 1).all():
            around.append(tuple(counts.tolist()))
    found = cuts_near(block_s, send_s, start, radius=radius, num=5, width=1000)
    best = sorted(metric(block_s, send_s, counts) for counts in around)[:5]
    assert set(found) <= set(around)
    assert [metric(block_s, send_s, counts) for counts in found] == pytest.approx(best)


def test_radius_1_of_4_stages_has_27_candidates():
    block_s = np.ones(40)
    found = cuts_near(block_s, np.zeros((3, 40)), greedy_cut(block_s, 4), radius=1, num=100)
    assert len(found) == len(set(found)) == 27
    assert found[0] == (10, 10, 10, 10)


def test_a_costly_message_moves_the_cut_away_from_it():
    block_s, send_s = np.ones(12), np.zeros((1, 12))
    send_s[0, 5] = 5.0
    assert cuts_near(block_s, send_s, (6, 6))[0] in [(5, 7), (7, 5)]


def test_what_is_run_decides_whatever_the_rank():
    cuts = [(2, 2), (1, 3), (3, 1)]
    assert fastest_cut(cuts, lambda counts: counts[0]) == (1, 3)
    assert fastest_cut(cuts, lambda counts: 0.0) == (2, 2)


LLM = language_model(Transformer(6144, 16_384, 48, 8, gated=True, norm="rms", causal=True), 48, 92_544)
PAIRS = [
    (vit("image", Transformer(3200, 12_800, 25), 45, num_positions=1024, class_row=True), 1.5, (22, 23, 24, 24)),
    (vit("image", Transformer(4096, 20_480, 32), 32, num_positions=1024, class_row=True), 1.0, (17, 18, 23, 22)),
]


@pytest.mark.parametrize(("encoder", "weight", "published"), PAIRS)
def test_splits_of_omnibal_table_9(encoder, weight, published):
    """InternVL-6B and EVA-CLIP-8B with InternLM2-20B; the weight is what InternViT's splits say (docs/papers.md)."""
    given_to = [(layer, np.full(9, 1024), weight) for layer in encoder.layers]
    given_to += [(layer, np.array([4096]), 1.0) for layer in LLM.layers]
    block_s = np.array(
        [
            factor * layer_flops(layer, work_of(layer, given)).forward[0]
            for layer, given, factor in given_to
            if layer.attention
        ]
    )
    assert partition(block_s.tolist(), 4) == published
    assert published in cuts_near(block_s, np.zeros((3, len(block_s))), greedy_cut(block_s, 4))


def test_cuts_without_seconds():
    blocks = blocks_of(job(), ("image", "audio", "backbone"), 1, 1, 1)
    assert np.bincount(by_layers(blocks, 3)).tolist() == [6, 6, 6]
    held = np.bincount(by_parameters(blocks, 3), blocks.parameters)
    assert held.max() <= np.bincount(by_layers(blocks, 3), blocks.parameters).max()
