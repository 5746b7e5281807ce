"""Fills inside passes of the backbone run while the rows of its tensor-parallel ranks are on their way."""

import torch

from motet.runtime.clock import ActionClock
from motet.schedule import parse_action
from motet.schedule.program import Kind
from motet.tensor_parallel import RowParts
from parity.planned import SAME_TYPES, run_of
from parity.test_tensor_parallel_plans import inside
from ranks import run_ranks

CASE = inside(0, recomputes=True)


def hear(rank, num_ranks):
    """(action, whether rows were on their way as it began) of a step on a rank."""
    run = run_of(CASE, torch.float64, SAME_TYPES)
    batches = run.batches(0, CASE.model())
    heard, on_their_way = [], []
    begin, wait_for = ActionClock.begin, RowParts._wait_for

    def begun(self, action):
        heard.append((str(action), bool(on_their_way)))
        begin(self, action)

    def waited_for(self, work, is_sum):
        on_their_way.append(work)
        wait_for(self, work, is_sum)
        on_their_way.pop()

    ActionClock.begin, RowParts._wait_for = begun, waited_for
    run.step.run(batches)
    return heard


def test_fills_inside_passes_run_beside_sums_and_gathers():
    fills = CASE.plan().fills
    before = {fill.action: parse_action(fill.before) for fill in fills if "." in fill.before}
    beside = {name for name, action in before.items() if action.part > 0 and action.kind in (Kind.F, Kind.B)}
    assert len(beside) > 10
    heard = run_ranks(hear, 4)
    for of_rank in heard:
        found = {name: is_beside for name, is_beside in of_rank if name in {fill.action for fill in fills}}
        assert found and found == {name: name in beside for name in found}
    assert {name for of_rank in heard for name, is_beside in of_rank if is_beside and name in beside} == beside
