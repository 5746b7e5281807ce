"""The native engine and what it is given agree with the readable reference, action for action."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.schedule import (
    Sharding,
    add_communication,
    add_exchanges,
    add_fsdp,
    add_recompute,
    data_parallel,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    split_parts,
    zb_h1,
    zb_v,
)
from motet.schedule.check.dry_run import event_of
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.bubble_filling import EncoderPipeline, coarse_fills, fill_bubbles, global_order
from motet.schedule.generators.disaggregated import Pipeline, UnitEdge, disaggregated
from motet.schedule.generators.modality_parallel import add_replicas, modality_parallel
from motet.schedule.passes.data_parallel import add_data_parallel
from motet.simulate import simulate, stage_times
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.lower import waits
from motet.simulate.engine.streams import STREAM_OF_KIND
from motet.simulate.engine.table import action_table
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


def filled():
    """Two encoder pipelines in the bubbles of an interleaved backbone, in slices."""
    backbone = interleaved_1f1b(2, 2, 4)
    first, second = global_order([2, 2])
    encoders = [EncoderPipeline("image", (0,), first), EncoderPipeline("image", (1,), second)]
    return add_communication(fill_bubbles(backbone, encoders, coarse_fills(backbone, encoders, num_parts=3)))


def sharded(num_ranks, sharding):
    units = {0: (False, False, True), 1: (True,) * 4}
    program = add_exchanges(data_parallel({"image": True, "backbone": True}, num_ranks, 2))
    for stage, own in units.items():
        program = split_parts(program, stage, len(own), len(own))
    return add_fsdp(program, units, sharding)


GENERATED = {
    "gpipe": gpipe(3, 4, has_backward=[False, True, True]),
    "1f1b": one_f_one_b(4, 6),
    "1f1b, sends, recomputation": add_recompute(add_communication(one_f_one_b(4, 6)), [0, 2]),
    "interleaved": interleaved_1f1b(2, 3, 4),
    "zb_h1": zb_h1(3, 5),
    "zb_v, sends": add_communication(zb_v(3, 6)),
    "modality parallel": add_communication(modality_parallel({"image": 2, "audio": 1}, 3, 5)),
    "encoders replicated": add_replicas(one_f_one_b(3, 4), {"image": True, "audio": True}),
    "disaggregated": add_communication(
        disaggregated([Pipeline(("image",), 3), Pipeline(("backbone",) * 2, 2)], [UnitEdge(0, 1)], 4)
    ),
    "filled": filled(),
    "data parallel, nothing learns": data_parallel({"image": False, "backbone": False}, 2, 2),
    "sharded": sharded(4, Sharding()),
    "sharded in replicas": sharded(4, Sharding(2)),
    "not sharded": sharded(2, Sharding(1)),
} | {
    f"ZeRO {zero}": add_data_parallel(interleaved_1f1b(2, 2, 4), dict.fromkeys(range(4), zero), range(1, 4))
    for zero in range(4)
}


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
