"""Passes of encoders in bubbles of known places."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from motet.simulate.filling.placement import FAR, PassParts, Placement, RankBubbles, StepEncoder
from motet.simulate.filling.search import shortest


def encoder(ranks, forward, backward, needed, ready, num_parts=1):
    """Each pipeline's stages take the same. forward, backward: ticks of a part, per microbatch."""
    passes = [
        tuple(tuple(PassParts(num_parts, ticks) for _ in stages) for stages in ranks) for ticks in (forward, backward)
    ]
    return StepEncoder(tuple(map(tuple, ranks)), *passes, needed, ready)


def bubbles(*busy):
    """The bubbles of a rank that is busy from, to, ..."""
    return RankBubbles(
        [-FAR, *[end for _, end in busy]], [*[start for start, _ in busy], FAR], list(range(len(busy) + 1))
    )


def test_what_bubbles_do_not_hold_is_before_and_after():
    # Two microbatches of 3 parts of 2; the bubble from 4 to 9 holds 2 parts.
    one = encoder([(0,)], [2, 2], [3, 3], needed=[0, 12], ready=[4, 20], num_parts=3)
    placement = Placement([bubbles((0, 4), (9, 12), (12, 20))], [one], end=20)
    # Before the backbone: the first microbatch, and a part of the second. Its backward pass has no room before 20.
    assert placement.lead([[0, 0]]) == 8
    runs = [(run.start, run.microbatch, run.is_backward, run.part, run.num) for run in placement.runs([[0, 0]])[0]]
    assert runs == [
        (-8, 0, False, 0, 3),
        (-2, 1, False, 0, 1),
        (4, 1, False, 1, 2),
        (20, 0, True, 0, 3),
        (29, 1, True, 0, 3),
    ]
    assert placement.taken([[0, 0]]) == 8 + 38


def test_stages_of_a_pipeline_follow_each_other():
    one = encoder([(0, 1)], [5], [7], needed=[4], ready=[10])
    placement = Placement([bubbles((4, 10)), bubbles((6, 8))], [one], end=10)
    (first, back), (second, last) = placement.runs([[0]])
    assert (first.start, second.start, last.start, back.start) == (-6, -1, 10, 17)
    assert placement.taken([[0]]) == 6 + 24


def test_a_frozen_encoder_has_no_backward_passes():
    frozen = StepEncoder(((0,),), ((PassParts(1, [5]),),), ((PassParts(0, []),),), [4], [0])
    assert Placement([bubbles((4, 10))], [frozen], end=10).taken([[0]]) == 11


@given(data=st.data())
def test_whatever_is_placed_can_run(data):
    """Parts do not overlap each other or the backbone; forward passes end in time, backward passes begin behind it."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    num_ranks, num = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    every = []
    for _ in range(num_ranks):
        times = np.sort(rng.integers(0, 300, 2 * int(rng.integers(1, 8)))).reshape(-1, 2)
        every.append(bubbles(*[(int(start), int(end)) for start, end in times if start < end]))
    encoders = []
    for _ in range(int(rng.integers(1, 3))):
        pp = int(rng.choice([size for size in range(1, num_ranks + 1) if num_ranks % size == 0]))
        ranks = [tuple(range(first, num_ranks, num_ranks // pp)) for first in range(num_ranks // pp)]
        needed = np.sort(rng.integers(0, 200, num)).tolist()
        ready = (np.sort(rng.integers(200, 300, num))).tolist()
        ticks = rng.integers(1, 20, (2, num)).tolist()
        encoders.append(encoder(ranks, *ticks, needed, ready, num_parts=int(rng.integers(1, 4))))
    placement = Placement(every, encoders, end=300)
    pipelines = [rng.integers(0, len(one.ranks), num).tolist() for one in encoders]
    lead, ends, starts = placement.lead(pipelines), {}, {}
    for rank, runs in enumerate(placement.runs(pipelines)):
        busy = sorted(zip(every[rank].ends[:-1], every[rank].starts[1:]))
        for run in runs:
            one = encoders[run.encoder]
            passes = (one.backward if run.is_backward else one.forward)[0]
            busy.append((run.start, run.start + run.num * passes[run.stage].ticks[run.microbatch]))
            key = run.encoder, run.stage, run.microbatch, run.is_backward
            starts[key], ends[key] = min(starts.get(key, FAR), busy[-1][0]), max(ends.get(key, -FAR), busy[-1][1])
        busy.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(busy))
    assert min(starts.values()) >= -lead
    assert placement.taken(pipelines) == lead + max(300, *ends.values())
    for number, one in enumerate(encoders):
        last = len(one.ranks[0]) - 1
        for microbatch in range(num):
            assert ends[number, last, microbatch, False] <= one.needed[microbatch]
            assert starts[number, last, microbatch, True] >= one.ready[microbatch]
            for stage in range(last):
                assert ends[number, stage, microbatch, False] <= starts[number, stage + 1, microbatch, False]
                assert ends[number, stage + 1, microbatch, True] <= starts[number, stage, microbatch, True]


@given(seed=st.integers(0, 2**32))
def test_the_search_is_no_worse_than_the_plans_own_choice_and_leaves_no_pipeline_without_work(seed):
    rng = np.random.default_rng(seed)
    num = int(rng.integers(3, 9))
    times = [bubbles((10, 200)), bubbles((40, 220)), bubbles((70, 240))]
    ticks = rng.integers(1, 60, (2, num)).tolist()
    one = encoder([(0,), (1,), (2,)], *ticks, np.sort(rng.integers(0, 99, num)).tolist(), [150] * num)
    placement, own = Placement(times, [one], end=240), [[m % 3 for m in range(num)]]
    found, taken = shortest(placement, own)
    assert taken == placement.taken(found) <= placement.taken(own)
    assert set(found[0]) == {0, 1, 2}


def test_work_is_dealt_out_evenly():
    one = encoder([(0,), (1,)], [8, 7, 6, 5, 4], [1] * 5, [0] * 5, [100] * 5)
    found, _ = shortest(Placement([bubbles((0, 100))] * 2, [one], end=100), [[0, 0, 0, 0, 1]])
    work = np.bincount(found[0], [8, 7, 6, 5, 4])
    assert sorted(work.tolist()) == [15, 15]
