"""Schedules of a chain: valid for every size, and as long, and as thrifty, as their papers say."""

import itertools
import math
from dataclasses import replace

import pytest

from motet.core.errors import ArgumentError
from motet.schedule import Kind, gpipe, high_water, interleaved_1f1b, one_f_one_b, validate, zb_h1, zb_v
from unit.schedule.executor import Refused, execute, makespan, seconds_of

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 8, 12, 13)]
SECONDS = [(1, 2), (1, 1), (2, 1), (3, 4)]


def generated(p, m):
    yield gpipe(p, m)
    yield one_f_one_b(p, m)
    yield zb_h1(p, m)
    yield zb_v(p, m)
    for v in (1, 2, 3):
        for deferred in (False, True):
            yield interleaved_1f1b(p, v, m, deferred_warmup=deferred)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_schedule_is_valid_and_can_be_executed(p, m):
    for program in generated(p, m):
        validate(program)
        execute(program)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b"), SECONDS)
def test_gpipe_and_1f1b_take_as_long(p, m, f, b):
    for schedule in (gpipe, one_f_one_b):
        assert makespan(schedule(p, m), seconds_of(f, b)) == (m + p - 1) * (f + b)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_in_flight(p, m):
    assert high_water(gpipe(p, m), [1] * p).tolist() == [m] * p
    assert high_water(one_f_one_b(p, m), [1] * p).tolist() == [min(m, p - s) for s in range(p)]
    assert high_water(zb_h1(p, m), [1] * p).tolist() == [min(m, p)] * p
    assert max(high_water(zb_v(p, m), [1] * 2 * p)) == min(2 * m, 2 * p)


@pytest.mark.parametrize(("p", "v", "rounds"), [(p, v, k) for p in (1, 2, 4, 5) for v in (1, 2, 3) for k in (1, 2, 4)])
@pytest.mark.parametrize(("f", "b"), SECONDS)
def test_interleaving_divides_the_bubble_by_the_chunks(p, v, rounds, f, b):
    m = rounds * p
    for deferred in (False, True):
        computed = m * v * (f + b)
        bubble = makespan(interleaved_1f1b(p, v, m, deferred_warmup=deferred), seconds_of(f, b)) - computed
        assert bubble * v * m == (p - 1) * computed


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_deferred_warmup_takes_microbatches_later_and_delays_nothing(p, m, v):
    default, deferred = interleaved_1f1b(p, v, m), interleaved_1f1b(p, v, m, deferred_warmup=True)
    for f, b in SECONDS:
        (start, end), (later, ended) = execute(default, seconds_of(f, b)), execute(deferred, seconds_of(f, b))
        assert max(ended.values()) <= max(end.values())
        firsts = [action for action in start if action.stage == 0 and action.kind is Kind.F]
        assert all(later[action] >= start[action] for action in firsts)
    assert (high_water(deferred, [1] * p * v) <= high_water(default, [1] * p * v)).all()


def test_deferred_warmup_of_the_paper():
    """Optimus Figure 12: of 8 microbatches on 4 ranks with 2 chunks, the last four are taken in later."""
    taken = []
    for deferred in (False, True):
        row = interleaved_1f1b(4, 2, 8, deferred_warmup=deferred).actions[0]
        warmup = itertools.takewhile(lambda action: action.kind is Kind.F, row)
        taken.append([action.microbatch for action in warmup if action.stage == 0])
    assert taken == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3]]


def with_one_less_ahead(program, rank):
    forward, backward = ([a for a in program.actions[rank] if a.kind is kind] for kind in (Kind.F, Kind.B))
    num_ahead = program.actions[rank].index(backward[0]) - 2
    if num_ahead < 0:
        return None
    turns = itertools.chain.from_iterable(itertools.zip_longest(forward[num_ahead:], backward))
    row = (*forward[:num_ahead], *(action for action in turns if action))
    return replace(program, actions=(*program.actions[:rank], row, *program.actions[rank + 1 :]))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 3, 3), (4, 2, 8), (4, 3, 12), (3, 1, 6)])
@pytest.mark.parametrize(("f", "b"), SECONDS)
def test_deferred_warmup_is_as_late_as_it_can_be(p, v, m, f, b):
    """One forward pass less ahead, on any rank, delays the step or ends it in a deadlock."""
    program = interleaved_1f1b(p, v, m, deferred_warmup=True)
    for rank in range(p):
        if later := with_one_less_ahead(program, rank):
            assert taken(later, seconds_of(f, b)) > makespan(program, seconds_of(f, b))


def taken(program, seconds):
    try:
        return makespan(program, seconds)
    except Refused:
        return math.inf


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 4, 2), (2, 1, 2)])
def test_zb_h1_bubble(p, f, i, w):
    for m in (p, p + 1, 2 * p, 3 * p + 2):
        bubble = makespan(zb_h1(p, m), seconds_of(f, input_=i, weight=w)) - m * (f + i + w)
        assert bubble == (p - 1) * max(f + i - w, f)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_zb_v_has_no_bubble_once_it_runs(p):
    for m in (2 * p - 1, 2 * p, 4 * p + 1):
        start, end = execute(zb_v(p, m), seconds_of(1, input_=1, weight=1))
        assert max(end.values()) == 6 * m + p - 1
        for row in zb_v(p, m).actions:
            assert end[row[-1]] - start[row[0]] == 6 * m


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_leading_stages_without_backward(schedule):
    program = schedule(3, 4, has_backward=[False, True, True])
    validate(program)
    assert [str(action) for action in program.actions[0]] == ["0F0", "0F1", "0F2", "0F3"]
    assert program.actions[1:] == schedule(3, 4).actions[1:]
    assert high_water(program, [1, 1, 1])[0] == 0
    validate(schedule(2, 3, has_backward=[False, False]))


def test_wrong_arguments_are_named():
    for call, named in [
        (lambda: gpipe(0, 3), "num_stages is 0"),
        (lambda: one_f_one_b(2, 0), "num_microbatches is 0"),
        (lambda: zb_h1(2, -1), "num_microbatches is -1"),
        (lambda: zb_v(0, 1), "num_ranks is 0"),
        (lambda: interleaved_1f1b(2, 0, 4), "num_chunks is 0"),
        (lambda: gpipe(2, 2, has_backward=[True]), "1 flags"),
        (lambda: one_f_one_b(3, 2, has_backward=[False, True, False]), "stage 2 has no backward"),
    ]:
        with pytest.raises(ArgumentError, match=named):
            call()
