"""Orders of microbatches: permutations that make no step longer, against an event simulation and brute force."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import island_makespans, order_islands, order_microbatches, pipeline_makespan
from motet.balance.reference.reordering import Clock
from motet.balance.step_graph import one_f_one_b_graph
from unit.balance.contract import BACKENDS

durations = st.tuples(st.integers(1, 5), st.integers(0, 9)).flatmap(
    lambda shape: st.tuples(
        *[
            st.lists(
                st.lists(st.integers(0, 50), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
            )
            for _ in range(2)
        ]
    )
)


def simulate(forward, backward, order):
    """When each action of 1F1B ends: the stages' lists of actions, executed as soon as what they need is there."""
    num_stages, count = len(forward), len(order)
    programs = []
    for stage in range(num_stages):
        warmup = min(num_stages - 1 - stage, count)
        actions = [("F", i) for i in range(warmup)]
        for i in range(count - warmup):
            actions += [("F", warmup + i), ("B", i)]
        programs.append(actions + [("B", i) for i in range(count - warmup, count)])
    ends = {}
    places, free = [0] * num_stages, [0] * num_stages
    while any(place < len(program) for place, program in zip(places, programs, strict=True)):
        for stage, program in enumerate(programs):
            if places[stage] == len(program):
                continue
            kind, i = program[places[stage]]
            before, after = ("F", i, stage - 1), ("B", i, stage + 1)
            needed = before if kind == "F" else after
            outside = stage == 0 if kind == "F" else stage == num_stages - 1
            if not outside and needed not in ends:
                continue
            takes = (forward if kind == "F" else backward)[stage][order[i]]
            free[stage] = max(free[stage], 0 if outside else ends[needed]) + takes
            ends[kind, i, stage] = free[stage]
            places[stage] += 1
    return ends


def seconds(table):
    return np.array(table, dtype=float).reshape(len(table), -1) / 1e9


@given(durations=durations)
def test_permutation_no_slower_and_equal_backends(durations):
    forward, backward = map(seconds, durations)
    num_stages = len(forward)
    order, reference = (order_microbatches(forward, backward, num_stages, backend=backend) for backend in BACKENDS)
    np.testing.assert_array_equal(order, reference)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(forward.shape[1]))
    makespans = {pipeline_makespan(forward, backward, num_stages, order, backend=backend) for backend in BACKENDS}
    assert len(makespans) == 1
    assert makespans.pop() <= pipeline_makespan(forward, backward, num_stages)


@given(data=st.data(), num_islands=st.integers(1, 4), num_stages=st.integers(1, 4), count=st.integers(0, 7))
def test_the_slowest_of_several_islands_gets_faster_alike_in_both_backends(data, num_islands, num_stages, count):
    graph, size = one_f_one_b_graph(num_stages, count), num_islands * count
    rows = st.lists(st.integers(0, 50), min_size=2 * num_stages, max_size=2 * num_stages)
    durations = np.array(data.draw(st.lists(rows, min_size=size, max_size=size)), dtype=np.int64).reshape(
        size, 2 * num_stages
    )
    groups = np.array(data.draw(st.permutations(range(size))), dtype=np.int64).reshape(num_islands, count)
    before = island_makespans(graph, durations, groups)
    limit = data.draw(st.sampled_from([2**62, int(before.max())]))
    (ordered, after), reference = (
        order_islands(graph, durations, groups, limit=limit, backend=backend) for backend in BACKENDS
    )
    np.testing.assert_array_equal(ordered, reference[0])
    np.testing.assert_array_equal(after, reference[1])
    np.testing.assert_array_equal(np.sort(ordered, axis=1), np.sort(groups, axis=1))
    assert (after <= before).all()
    np.testing.assert_array_equal(after, island_makespans(graph, durations, ordered, backend="reference"))


@given(durations=durations)
def test_makespan_is_that_of_an_event_simulation(durations):
    forward, backward = durations
    order = list(range(len(forward[0])))[::-1]
    ends = simulate(forward, backward, order)
    makespan = pipeline_makespan(seconds(forward), seconds(backward), len(forward), order)
    assert round(makespan * 1e9) == max(ends.values(), default=0)


@given(durations=durations.filter(lambda d: len(d[0]) > 1 and len(d[0][0]) >= len(d[0])))
def test_intervals_are_those_of_an_event_simulation(durations):
    forward, backward = durations
    num_stages, count = len(forward), len(forward[0])
    ends = simulate(forward, backward, list(range(count)))
    graph = one_f_one_b_graph(num_stages, count)
    clock = Clock(graph, np.array([*forward, *backward]).T)
    for position in range(num_stages - 1, count):  # the microbatch that is to fill the gap
        order = [*range(position), *[clock.unknown] * (count - position), 0]
        clock.run(order, 0, len(graph.row))
        _, before, after, num_forwards = graph.gaps[position]
        done = position - num_stages  # the backward that the gap is after
        free = ends["B", done, 0] if done >= 0 else ends["F", num_stages - 2, 0]
        assert max(clock.start(after) - clock.ends[before], 0) == max(ends["B", done + 1, 1] - free, 0)
        assert num_forwards == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_to_brute_force(backend):
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        num_stages, count = int(rng.integers(2, 5)), int(rng.integers(4, 7))
        forward = np.outer(rng.uniform(0.5, 2, num_stages), np.ones(count))
        forward[0] = rng.lognormal(0, 1, count)
        args = forward, 2 * forward, num_stages
        best = min(pipeline_makespan(*args, order) for order in permutations(range(count)))
        ratios.append(pipeline_makespan(*args, order_microbatches(*args, backend=backend)) / best)
    assert np.mean(ratios) <= 1.005
    assert max(ratios) <= 1.05


def lower_bound(forward, backward):
    """Every stage computes all; before and after it, the others compute at least the shortest microbatch."""
    work = (forward + backward).sum(axis=1)
    least = (forward + backward).min(axis=1)
    return max(work[stage] + least[:stage].sum() for stage in range(len(work)))


def test_uneven_encoders_leave_short_bubbles():
    rng = np.random.default_rng(0)
    gained, left = [], []
    for _ in range(20):
        forward = np.ones((4, 32))
        forward[0] = np.clip(rng.lognormal(-0.5, 0.8, 32), 0.05, 4)
        args = forward, 2 * forward, 4
        makespan = pipeline_makespan(*args, order_microbatches(*args))
        gained.append(pipeline_makespan(*args) / makespan)
        left.append(makespan / lower_bound(forward, 2 * forward))
    assert np.mean(gained) >= 1.04
    assert np.mean(left) <= 1.06


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_pipelines(backend):
    assert order_microbatches([], [], 4, backend=backend).tolist() == []
    assert pipeline_makespan([], [], 4, backend=backend) == 0
    assert order_microbatches([1.0], [2.0], 4, backend=backend).tolist() == [0]
    assert order_microbatches([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 1, backend=backend).tolist() == [0, 1, 2]
    assert sorted(order_microbatches([0.0] * 5, [0.0] * 5, 8, backend=backend).tolist()) == list(range(5))
    assert pipeline_makespan([1.0, 1.0], [2.0, 2.0], 2, backend=backend) == 9
    long = order_microbatches([1e8, 2e8, 3e8], [2e8, 4e8, 6e8], 2, backend=backend)
    assert sorted(long.tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: order_microbatches([1.0], [1.0], 0), "num_stages is 0; it must be at least 1"),
        (lambda: order_microbatches([[1.0]], [1.0], 2), r"forward_s has shape \(1, 1\)"),
        (lambda: order_microbatches([1.0, 2.0], [1.0], 2), "backward_s has 1 microbatches; forward_s has 2"),
        (lambda: order_microbatches([1.0], [np.nan], 2), "backward_s holds nan"),
        (lambda: order_microbatches([-1.0], [1.0], 2), "forward_s holds -1.0"),
        (lambda: order_microbatches([1e10], [1.0], 1), "below 292 years"),
        (lambda: pipeline_makespan([1.0, 1.0], [1.0, 1.0], 2, [0, 0]), r"order is \[0, 0\]"),
    ],
)
def test_wrong_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
