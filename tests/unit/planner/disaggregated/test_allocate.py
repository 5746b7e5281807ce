"""Ranks of units: as good as trying everything, never worse with more ranks, and what rigid allocation loses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.planner.disaggregated.allocate import allocate, rigid
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions


def table(name: str, side: int, rows: list[tuple[float, ...]]) -> UnitOptions:
    """rows: num_examples, tp, pp, pass_s, stage_s, once_s, fixed, sharded, kept bytes."""
    columns = [np.array(column) for column in zip(*rows)]
    return UnitOptions(name, side, *columns[:3], *(column.astype(float) for column in columns[3:]))


def alike(name: str, side: int, seconds: float, *, sizes: tuple[int, ...], num_stages: int, tps=(1, 2)) -> UnitOptions:
    """The forward model of section 4.2: a unit that tensor parallelism and stages divide evenly."""
    rows = [
        (size, tp, pp, size * seconds / tp, size * seconds / tp / pp, 0.0, 0.0, 0.0, 0.0)
        for size, tp, pp in product(sizes, tps, range(1, num_stages + 1))
    ]
    return table(name, side, rows)


def exhaustive(units: list[UnitOptions], limits: Limits) -> float:
    """The time of the fastest combination, by trying all."""
    best = np.inf
    for taken in range(1, limits.batch_size + 1):
        if limits.batch_size % taken:
            continue
        for rows in product(*(range(len(unit.tp)) for unit in units)):
            best = min(best, step_s(units, rows, taken, limits))
    return best


def step_s(units: list[UnitOptions], rows: tuple[int, ...], taken: int, limits: Limits) -> float:
    count, ranks = limits.batch_size // taken, 0
    longest = {
        side: max((int(u.pp[r]) for u, r in zip(units, rows) if u.side == side), default=0) for side in (-1, 0, 1)
    }
    for unit, row in zip(units, rows):
        if taken % unit.num_examples[row]:
            return np.inf
        dp = taken // int(unit.num_examples[row])
        ranks += dp * int(unit.tp[row]) * int(unit.pp[row])
        to_end = int(unit.pp[row]) + sum(longest[side] for side in (0, 1) if side > unit.side)
        held = unit.fixed_bytes[row] + unit.sharded_bytes[row] / dp + unit.kept_bytes[row] * min(count, to_end)
        if held > limits.capacity_bytes:
            return np.inf
    if ranks > limits.num_ranks:
        return np.inf
    warmup = sum(max((u.pass_s[r] for u, r in zip(units, rows) if u.side == side), default=0.0) for side in (-1, 0, 1))
    slowest = max(u.stage_s[r] for u, r in zip(units, rows))
    once = max(u.once_s[r] for u, r in zip(units, rows))
    return warmup / limits.num_chunks + slowest * (count - 1) + once


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[UnitOptions], Limits]:
    sides = draw(st.sampled_from([(0,), (-1, 0), (0, 1), (-1, 0, 1), (-1, -1, 0), (1, 0, 1)]))
    whole = st.integers(0, 12)
    units = []
    for number, side in enumerate(sides):
        rows = [
            (
                draw(st.sampled_from([1, 2, 3])),
                draw(st.sampled_from([1, 2])),
                draw(st.integers(1, 3)),
                *(draw(whole) for _ in range(6)),
            )
            for _ in range(draw(st.integers(1, 5)))
        ]
        units.append(table(f"unit {number}", side, rows))
    batch = draw(st.sampled_from([1, 4, 6, 12]))
    return units, Limits(draw(st.integers(1, 24)), batch, draw(st.integers(8, 60)), draw(st.sampled_from([1, 2])))


@pytest.mark.slow
@given(jobs())
@settings(max_examples=300, deadline=None)
def test_is_as_fast_as_the_best_of_all_combinations(job: tuple[list[UnitOptions], Limits]) -> None:
    units, limits = job
    found, best = allocate(units, limits), exhaustive(units, limits)
    if found is None:
        assert best == np.inf
        return
    assert found.time_s == pytest.approx(best, abs=1e-9)
    check(found, units, limits)


def check(found: Allocation, units: list[UnitOptions], limits: Limits) -> None:
    """What it says of itself is so: ranks, memory, seconds; and no unit could do with fewer ranks."""
    rows = tuple(share.row for share in found.shares)
    taken = found.shares[0].num_examples * found.shares[0].dp
    assert found.num_microbatches * taken == limits.batch_size
    assert step_s(units, rows, taken, limits) == pytest.approx(found.time_s, abs=1e-9)
    for index, (unit, share) in enumerate(zip(units, found.shares)):
        row = share.row
        assert (share.num_examples, share.tp, share.pp) == (unit.num_examples[row], unit.tp[row], unit.pp[row])
        assert share.num_examples * share.dp == taken
        for other in range(len(unit.tp)):
            ranks = unit.tp[other] * unit.pp[other] * (taken // unit.num_examples[other])
            if ranks < share.num_ranks:
                changed = step_s(units, (*rows[:index], other, *rows[index + 1 :]), taken, limits)
                assert changed > found.time_s + 1e-9


@pytest.mark.slow
@given(jobs(), st.integers(1, 8))
@settings(deadline=None)
def test_more_ranks_are_never_slower(job: tuple[list[UnitOptions], Limits], more: int) -> None:
    units, limits = job
    few, many = allocate(units, limits), allocate(units, replace(limits, num_ranks=limits.num_ranks + more))
    assert few is None or (many is not None and many.time_s <= few.time_s + 1e-9)


@given(jobs(), st.integers(1, 30))
@settings(deadline=None)
def test_more_memory_is_never_slower(job: tuple[list[UnitOptions], Limits], more: int) -> None:
    units, limits = job
    little, much = (
        allocate(units, limits),
        allocate(units, replace(limits, capacity_bytes=limits.capacity_bytes + more)),
    )
    assert little is None or (much is not None and much.time_s <= little.time_s + 1e-9)


@given(jobs())
@settings(deadline=None)
def test_rigid_ones_are_allocations_and_never_faster(job: tuple[list[UnitOptions], Limits]) -> None:
    units, limits = job
    best, other = allocate(units, limits), rigid(units, limits)
    if other is not None:
        assert best is not None and best.time_s <= other.time_s + 1e-9
        taken = other.shares[0].num_examples * other.shares[0].dp
        rows = tuple(share.row for share in other.shares)
        assert step_s(units, rows, taken, limits) == pytest.approx(other.time_s, abs=1e-9)


def test_rigid_gives_others_the_degrees_of_the_backbone_in_one_stage() -> None:
    units = [
        alike("image", -1, 1.0, sizes=(1, 2), num_stages=3),
        alike("backbone", 0, 8.0, sizes=(1,), num_stages=8),
        alike("picture", 1, 2.0, sizes=(1, 2), num_stages=3),
    ]
    found = rigid(units, Limits(24, 48))
    assert found is not None
    image, backbone, picture = found.shares
    assert image.pp == picture.pp == 1
    assert (image.tp, image.dp) == (backbone.tp, backbone.dp) == (picture.tp, picture.dp)


@given(
    st.floats(0.01, 3),
    st.floats(0.01, 3),
    st.integers(1, 8),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 4, 20]),
)
@settings(max_examples=60, deadline=None)
def test_gain_over_rigid_is_bounded_where_the_backbone_is_slowest(
    image_s: float, picture_s: float, pp: int, tp: int, dp: int, num_microbatches: int
) -> None:
    """(PP + 2) / PP, were the first microbatch's way nothing; PP + 1 of them more than M at most."""
    backbone_s = pp * max(image_s, picture_s)  # a stage of it is as slow as the slower of the two
    batch = dp * num_microbatches
    sizes = tuple(size for size in range(1, batch + 1) if batch % size == 0)
    units = [
        alike("image", -1, image_s, sizes=sizes, num_stages=3),
        alike("backbone", 0, backbone_s, sizes=(1,), num_stages=12),
        alike("picture", 1, picture_s, sizes=sizes, num_stages=3),
    ]
    given_rows = [unit.tp[:] == tp if unit.side else (unit.tp == tp) & (unit.pp == pp) for unit in units]
    limits = Limits((pp + 2) * dp * tp, batch, global_microbatch_size=dp)
    pinned = [
        UnitOptions(unit.name, unit.side, *(column[rows] for column in columns(unit)))
        for unit, rows in zip(units, given_rows)
    ]
    baseline, best = rigid(pinned, limits), allocate(units, replace(limits, global_microbatch_size=0))
    assert baseline is not None and best is not None
    assert baseline.time_s / best.time_s <= (pp + 2) / pp * (num_microbatches + pp + 1) / num_microbatches + 1e-9


def columns(unit: UnitOptions) -> list[np.ndarray]:
    return [value for value in vars(unit).values() if isinstance(value, np.ndarray)]


def test_gain_over_rigid_is_not_bounded_so_where_an_encoder_is_slowest() -> None:
    units = [
        alike("image", -1, 10.0, sizes=(1,), num_stages=10, tps=(1,)),
        alike("backbone", 0, 4.0, sizes=(1,), num_stages=4, tps=(1,)),
    ]
    limits = Limits(5, 1000, global_microbatch_size=1)
    baseline, best = rigid(units, limits), allocate(units, limits)
    assert baseline is not None and best is not None
    assert baseline.time_s / best.time_s > 2 > (4 + 2) / 4


def test_virtual_pipelines_divide_the_warm_up() -> None:
    units = [alike("image", -1, 1.0, sizes=(1,), num_stages=1), alike("backbone", 0, 8.0, sizes=(1,), num_stages=4)]
    plain, chunked = (allocate(units, Limits(10, 2, num_chunks=chunks)) for chunks in (1, 4))
    assert plain is not None and chunked is not None
    assert chunked.warmup_s < plain.warmup_s


def test_needs_one_backbone() -> None:
    unit = alike("image", -1, 1.0, sizes=(1,), num_stages=1)
    with pytest.raises(ArgumentError, match="exactly one of the units must be the backbone"):
        allocate([unit], Limits(4, 4))


def test_counts_below_one_are_refused() -> None:
    unit = alike("backbone", 0, 1.0, sizes=(1,), num_stages=1)
    with pytest.raises(ArgumentError, match="num_ranks is 0"):
        allocate([unit], Limits(0, 4))


def test_no_unit_gets_ranks_that_gain_nothing() -> None:
    units = [
        alike("image", -1, 1.0, sizes=(1,), num_stages=3, tps=(1,)),
        alike("backbone", 0, 8.0, sizes=(1,), num_stages=4, tps=(1,)),
    ]
    found = allocate(units, Limits(20, 4, global_microbatch_size=1))
    assert found is not None
    assert [share.num_ranks for share in found.shares] == [1, 4]


def test_replicas_that_do_not_share_examples_evenly_have_the_fewest_that_suffice() -> None:
    units = [
        alike("image", -1, 1.0, sizes=(1, 2, 3, 6), num_stages=1, tps=(1,)),
        alike("backbone", 0, 4.0, sizes=(1,), num_stages=1, tps=(1,)),
    ]
    limits = Limits(num_ranks=8, batch_size=6, global_microbatch_size=3, replicas={"image": 2, "backbone": 3})
    found = allocate(units, limits)
    assert found is not None and rigid(units, limits) is None
    assert [(share.dp, share.num_examples, share.filled) for share in found.shares] == [(2, 2, 0.75), (3, 1, 1.0)]
    assert allocate(units, replace(limits, replicas={"backbone": 2})) is None  # Its microbatches have one size.
