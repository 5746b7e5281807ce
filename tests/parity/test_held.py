"""What passes keep is what the simulator says: from F to B, or to W; and from I on no more bytes than from F on."""

import pytest
import torch

from motet.core.workload import BACKBONE
from motet.cost.memory import activation_bytes, stage_layers
from motet.runtime import planned_step
from motet.runtime.clock import ActionClock
from motet.runtime.place import Place
from motet.schedule.check.memory import high_water
from motet.schedule.program import Kind
from parity.planned import PlannedCase, run_planned
from parity.test_schedules import CUTS, on_ranks
from ranks import run_ranks


def size_of(products):
    """Bytes that weight products keep; memory that several share counts once."""
    tensors = [tensor for product in products for tensor in (product.rows, product.gradient)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def passes_kept(rank, num_ranks, case):
    """Of the last step: the backbone's passes that are kept after each action; (bytes before W, bytes as predicted)."""
    place, model = Place.of(case.plan(), rank), case.plan().model
    kept, bytes_of_w, running = [], [], []
    backbone = [number for number, stage in place.stages.items() if BACKBONE in stage.layers]

    class Running(planned_step._RunningPlan):
        def __init__(self, *given):
            super().__init__(*given)
            kept.clear()
            running[:] = [self]

    class Clock(ActionClock):
        def begin(self, action):
            key, tensors = (action.stage, action.microbatch), running[0].tensors
            if action.kind is Kind.W and action.stage in backbone:
                layers = list(stage_layers(model, {BACKBONE: place.stages[action.stage].layers[BACKBONE]}, {}))
                rows = int(running[0].batches[action.microbatch].sequences.offsets[-1])
                sizes = [activation_bytes(each.layer, rows, element_bytes=8) for each in layers]
                only = [p for p in tensors.products[key] if p.rows.shape[0] == rows]
                bytes_of_w.append((size_of(only), sum(sizes)))
            super().begin(action)

        def end(self, *given):
            super().end(*given)
            tensors = running[0].tensors
            kept.append({key for key in tensors.runs.keys() | tensors.products.keys() if key[0] in backbone})

    planned_step._RunningPlan, planned_step.ActionClock = Running, Clock
    run_planned(case)
    expected, held = [], set()
    for action in place.row.row:
        key = action.stage, action.microbatch
        if action.kind is Kind.F and action.stage in backbone:
            held = held | {key}
        if action.kind in (Kind.B, Kind.W):
            held = held - {key}
        expected.append(held)
    program = place.program.program
    of_stage = torch.tensor([BACKBONE in stage.layers for stage in place.program.stages]).double().numpy()
    assert max(map(len, expected)) == high_water(program, of_stage)[place.program_rank]
    return kept, expected, bytes_of_w


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_h1", "zb_v"])
def test_passes_are_kept_as_long_as_predicted(schedule):
    case = PlannedCase(on_ranks(2, *CUTS[schedule, 2]), schedule, batch_size=5)
    of_ranks = run_ranks(passes_kept, 2, case)
    assert all(kept == expected for kept, expected, _ in of_ranks)
    sizes = [size for _, _, bytes_of_w in of_ranks for size in bytes_of_w]
    assert all(0 < found <= predicted for found, predicted in sizes)
    assert bool(sizes) == (schedule != "interleaved_1f1b")
