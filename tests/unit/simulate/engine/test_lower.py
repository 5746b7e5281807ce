"""The native engine and what it is given agree with the readable reference, action for action."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.schedule.check.dry_run import event_of
from motet.schedule.dependencies import Dependencies
from motet.schedule.program import Kind
from motet.simulate import simulate, stage_times
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.lower import waits
from motet.simulate.engine.meetings import MetPasses
from motet.simulate.engine.simulate import Prepared, simulate_together
from motet.simulate.engine.streams import STREAM_OF_KIND
from motet.simulate.engine.table import action_table
from unit.schedule.generated import GENERATED
from unit.simulate.programs import programs, times_of


def check_waits(program):
    table = action_table(program)
    lookup = ActionIndex(table)
    found = waits(lookup, STREAM_OF_KIND[table.kind], overlap=True)
    pairs = set(zip(found.dependent.tolist(), found.dependency.tolist()))
    actions = [table.action(row) for row in range(len(table))]
    assert actions == [action for row in program.actions for action in row]
    first = {}
    for row, action in enumerate(actions):
        first.setdefault(event_of(action, program), row)
    assert lookup.operation.tolist() == [first[event_of(action, program)] for action in actions]
    dependencies = Dependencies(program)
    wanted = {
        (row, first[event_of(needed, program)])
        for row, action in enumerate(actions)
        for needed in dependencies.of(action)
    }
    assert pairs == wanted


@pytest.mark.parametrize("name", GENERATED)
def test_what_actions_of_every_schedule_wait_for(name):
    program = GENERATED[name]
    check_waits(program)
    times = stage_times(1.0 + np.arange(program.num_stages), 2.0 + np.arange(program.num_stages))
    native, reference = (simulate(program, times, backend=backend) for backend in ("native", "reference"))
    assert list(native) == list(reference)


@given(program=programs())
def test_what_actions_of_any_program_wait_for(program):
    check_waits(program)


@given(data=st.data(), overlap=st.booleans(), jitter=st.sampled_from([0.0, 0.3]))
def test_native_equals_reference_span_for_span(data, overlap, jitter):
    program = data.draw(programs())
    times = data.draw(times_of(program))
    native, reference = (
        simulate(program, times, overlap=overlap, jitter=jitter, backend=backend) for backend in ("native", "reference")
    )
    assert list(native) == list(reference)
    assert len(native) >= program.num_actions


@given(data=st.data(), overlap=st.booleans())
def test_native_equals_reference_where_islands_meet(data, overlap):
    program, num_islands = data.draw(programs()), data.draw(st.integers(1, 3))
    times = [data.draw(times_of(program)) for _ in range(num_islands)]
    times = [replace(one, forward_parts={}, backward_parts={}) for one in times]
    meets = st.lists(st.booleans(), min_size=program.num_microbatches, max_size=program.num_microbatches)
    # A stage meets itself in other islands; replicas of a Program are drawn in any order, and may not meet.
    of_stages = [[stage if each else -1 for each in data.draw(meets)] for stage in range(program.num_stages)]
    number = np.array([of_stages] * num_islands)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    kinds = (Kind.F, Kind.R, Kind.B, Kind.I)
    meeting = MetPasses(number, {kind: tuple(rng.random((2, *number.shape)) / 2) for kind in kinds})
    native, reference = (
        simulate_together(Prepared(program), times, meeting, overlap=overlap, backend=backend)
        for backend in ("native", "reference")
    )
    assert [list(one) for one in native] == [list(one) for one in reference]


@given(data=st.data(), overlap=st.booleans())
def test_native_and_reference_refuse_the_same_programs(data, overlap):
    program = data.draw(programs())
    rows = tuple(tuple(data.draw(st.permutations(row))) for row in program.actions)
    program = type(program)(program.stages, program.edges, rows, program.num_microbatches)
    times = data.draw(times_of(program))
    results = []
    for backend in ("native", "reference"):
        try:
            results.append(simulate(program, times, overlap=overlap, backend=backend).end_s)
        except ArgumentError as error:
            results.append(str(error))
    assert type(results[0]) is type(results[1])
    assert np.array_equal(*results)
