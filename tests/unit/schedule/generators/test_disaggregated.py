"""Units with data-parallel sizes of their own, and their broker."""

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
        (1, 1, [(0, 0)]),
        (2, 3, [(0, 0), (0, 1), (1, 1), (1, 2)]),
        (2, 1, [(0, 0), (1, 0)]),
        (1, 4, [(0, sink) for sink in range(4)]),
    ],
)
def test_the_broker_joins_replicas_that_share_examples(sources, sinks, expected):
    assert broker(sources, sinks) == expected


@given(SIZES, SIZES, SIZES)
def test_the_broker_joins_all_that_touch_one_example(sources, sinks, num_examples):
    """Every point of an example in a source's part, with every point of the same example in a sink's part."""
    fine = 2 * sources * sinks

    def parts(num_replicas):
        points = ((2 * k + 1) * num_examples for k in range(fine))
        return [(k * num_replicas // fine, point // (2 * fine)) for k, point in enumerate(points)]

    expected = {(source, sink) for source, one in parts(sources) for sink, other in parts(sinks) if one == other}
    assert set(broker(sources, sinks, num_examples)) >= expected
    if num_examples % sources == 0 == num_examples % sinks:
        assert set(broker(sources, sinks, num_examples)) == expected == set(broker(sources, sinks))


@given(SIZES, SIZES, st.integers(0, 12))
def test_what_is_sent_back_is_the_broker_the_other_way(sources, sinks, num_examples):
    back = broker(sinks, sources, num_examples)
    assert sorted((source, sink) for sink, source in back) == broker(sources, sinks, num_examples)


def test_a_lone_example_is_shared_by_all():
    assert broker(4, 1, 1) == [(source, 0) for source in range(4)]
    assert broker(2, 3, 3) == [(0, 0), (0, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("encoder_dp", "llm_dp", "replicas"),
    [(2, 3, (2, 3)), (4, 2, (2, 1)), (1, 8, (1, 8)), (6, 6, (1, 1)), (6, 4, (3, 2))],
)
def test_an_island_holds_each_unit_by_the_gcd(encoder_dp, llm_dp, replicas):
    units = [Pipeline(("image",), encoder_dp), Pipeline(("backbone", "backbone"), llm_dp)]
    whole = island(units, [UnitEdge(0, 1)])
    assert whole.num_replicas == replicas
    assert len(whole.stages) == replicas[0] + 2 * replicas[1]
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
