"""The native engine and what it is given agree with the readable reference, action for action."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.schedule import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from motet.schedule.dependencies import Dependencies
from motet.simulate import simulate
from motet.simulate.lookup import Lookup
from motet.simulate.lower import waits
from motet.simulate.streams import OF_KIND
from motet.simulate.table import action_table
from unit.simulate.programs import operation, programs, times_of


def check_waits(program):
    table = action_table(program)
    lookup = Lookup(table)
    found = waits(lookup, OF_KIND[table.kind], overlap=True)
    pairs = set(zip(found.dependent.tolist(), found.dependency.tolist()))
    actions = [table.action(row) for row in range(len(table))]
    assert actions == [action for row in program.actions for action in row]
    first = {}
    for row, action in enumerate(actions):
        first.setdefault(operation(program, action), row)
    assert lookup.operation.tolist() == [first[operation(program, action)] for action in actions]
    dependencies = Dependencies(program)
    wanted = {
        (row, first[operation(program, needed)])
        for row, action in enumerate(actions)
        for needed in dependencies.of(action)
    }
    assert pairs == wanted


@pytest.mark.parametrize(
    "program",
    [gpipe(3, 4), one_f_one_b(4, 6), interleaved_1f1b(2, 3, 4), zb_h1(3, 5), zb_v(3, 6)],
    ids=["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"],
)
def test_what_actions_of_a_chain_wait_for(program):
    check_waits(program)


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
