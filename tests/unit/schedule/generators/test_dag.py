"""1F1B over graphs of stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.schedule import Kind, Stage, add_communication, gpipe, one_f_one_b, validate
from motet.schedule.generators.dag import dag_1f1b, dag_gpipe, distances
from unit.schedule.longest_path import makespan

CHAIN = [(0, 1), (1, 2), (2, 3)]


def stages(count):
    return [Stage(rank) for rank in range(count)]


@pytest.mark.parametrize("num_frozen", [0, 1, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 9])
def test_on_a_chain_it_is_the_chains_schedule(num_microbatches, num_frozen):
    flags = [stage >= num_frozen for stage in range(4)]
    for graph, one in ((dag_1f1b, one_f_one_b), (dag_gpipe, gpipe)):
        made = graph(stages(4), CHAIN, num_microbatches, flags)
        assert made == one(4, num_microbatches, has_backward=flags)


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 7))
    pairs = [(source, sink) for sink in range(count) for source in range(sink)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    backward = [draw(st.booleans()) for _ in range(count)]
    for source, sink in sorted(edges):
        backward[sink] |= backward[source]
    return count, edges, draw(st.integers(1, 8)), backward


@given(graphs())
def test_any_graph_gives_a_program_that_can_be_executed(graph):
    count, edges, num_microbatches, backward = graph
    for generate in (dag_1f1b, dag_gpipe):
        program = generate(stages(count), edges, num_microbatches, backward)
        validate(program)
        validate(add_communication(program))


@given(graphs())
def test_a_stage_holds_no_more_than_its_way_to_the_end(graph):
    count, edges, num_microbatches, _ = graph
    program = dag_1f1b(stages(count), edges, num_microbatches)
    for distance, row in zip(distances(count, edges), program.actions, strict=True):
        held = peak = 0
        for action in row:
            held += 1 if action.kind is Kind.F else -1
            peak = max(peak, held)
        assert peak == min(num_microbatches, distance + 1)


def test_no_schedule_of_a_chain_with_this_memory_is_faster():
    assert makespan(dag_1f1b(stages(4), CHAIN, 8)) == (8 + 3) * 3


@pytest.mark.parametrize(
    ("edges", "flags", "words"),
    [
        ([(0, 1), (1, 2), (2, 0)], None, "feeds itself"),
        ([(0, 3)], None, "stage that is none"),
        ([(0, 1)], [True, False, True], "stage 1 has no backward pass, but stage 0"),
        ([(0, 1)], [True], "has_backward has 1"),
    ],
)
def test_wrong_graphs_are_refused(edges, flags, words):
    with pytest.raises(ArgumentError, match=words):
        dag_1f1b(stages(3), edges, 2, flags)


def test_two_stages_on_a_rank_and_no_microbatch_are_refused():
    with pytest.raises(ArgumentError, match="one stage on each"):
        dag_1f1b([Stage(0), Stage(0)], [], 2)
    with pytest.raises(ArgumentError, match="num_microbatches is 0"):
        dag_1f1b([Stage(0)], [], 0)
