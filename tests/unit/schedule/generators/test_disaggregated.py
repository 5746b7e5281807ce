"""Units with data-parallel sizes of their own, and their broker."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.schedule import add_communication, validate
from motet.schedule.generators.disaggregated import Pipeline, UnitEdge, broker, disaggregated, island
from unit.schedule.longest_path import makespan

SIZES = st.integers(1, 12)


@pytest.mark.parametrize(
    ("sources", "sinks", "expected"),
    [
        (1, 1, [(0, 0, Fraction(1))]),
        (2, 3, [(0, 0, Fraction(2, 3)), (0, 1, Fraction(1, 3)), (1, 1, Fraction(1, 3)), (1, 2, Fraction(2, 3))]),
        (2, 1, [(0, 0, Fraction(1)), (1, 0, Fraction(1))]),
        (1, 4, [(0, sink, Fraction(1, 4)) for sink in range(4)]),
    ],
)
def test_the_broker_joins_replicas_that_share_examples(sources, sinks, expected):
    assert broker(sources, sinks) == expected


@given(SIZES, SIZES)
def test_the_broker_carries_everything_once_and_evenly(sources, sinks):
    sent, received = [Fraction(0)] * sources, [Fraction(0)] * sinks
    for source, sink, share in broker(sources, sinks):
        assert share > 0
        sent[source] += share
        received[sink] += share / sources
    assert sent == [1] * sources
    assert received == [Fraction(1, sinks)] * sinks


@given(SIZES, SIZES)
def test_what_is_sent_back_is_the_broker_the_other_way(sources, sinks):
    there = {(source, sink): share / sources for source, sink, share in broker(sources, sinks)}
    back = {(source, sink): share / sinks for sink, source, share in broker(sinks, sources)}
    assert there == back


@pytest.mark.parametrize(
    ("encoder_dp", "llm_dp", "replicas"),
    [(2, 3, (2, 3)), (4, 2, (2, 1)), (1, 8, (1, 8)), (6, 6, (1, 1)), (6, 4, (3, 2))],
)
def test_an_island_holds_each_unit_by_the_gcd(encoder_dp, llm_dp, replicas):
    units = [Pipeline(("image",), encoder_dp), Pipeline(("backbone", "backbone"), llm_dp)]
    whole = island(units, [UnitEdge(0, 1)])
    assert whole.num_replicas == replicas
    assert len(whole.stages) == replicas[0] + 2 * replicas[1]
    assert len(whole.shares) == len(whole.edges)
    program = disaggregated(units, [UnitEdge(0, 1)], 5)
    validate(add_communication(program))
    assert makespan(program) == (5 - 1 + 3) * 3


@given(st.tuples(SIZES, SIZES, SIZES), st.integers(1, 4))
def test_encoder_backbone_and_generator(sizes, num_microbatches):
    units = [Pipeline((name,) * depth, dp) for name, depth, dp in zip("ebg", (1, 2, 1), sizes, strict=True)]
    program = disaggregated(units, [UnitEdge(0, 1), UnitEdge(1, 2)], num_microbatches)
    validate(program)
    assert makespan(program) == (num_microbatches - 1 + 4) * 3


def test_replicas_of_a_stage_form_a_group():
    program = disaggregated([Pipeline(("image",), 1), Pipeline(("backbone",) * 2, 2)], [UnitEdge(0, 1)], 1)
    assert [stage.group for stage in program.stages] == [-1, 0, 1, 0, 1]


def test_a_feed_may_join_stages_in_the_middle():
    whole = island([Pipeline(("audio",), 1), Pipeline(("image", "backbone"), 1)], [UnitEdge(0, 1, sink_stage=1)])
    assert whole.edges == ((1, 2), (0, 2))


def test_a_frozen_encoder_has_no_backward_pass():
    program = disaggregated(
        [Pipeline(("image",), 2), Pipeline(("backbone",), 1)], [UnitEdge(0, 1)], 3, [[False], [True]]
    )
    assert [len(row) for row in program.actions] == [3, 3, 6]


def test_a_unit_without_stages_is_refused():
    with pytest.raises(ArgumentError, match="0 stages and dp 1"):
        disaggregated([Pipeline((), 1)], [], 1)
