"""Programs on lanes that block: a send returns when its receive has been posted, and each lane has one thread.

NCCL may behave so; gloo hides an order that is wrong, as it buffers what is in flight. Ranks walk their rows with the
executor and the messages of training, `Executor` and `Messages`; lanes alone are replaced. Each message says what it
is.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.dispatch.edge_messages import MessagePart
from motet.runtime.clock import ActionClock
from motet.runtime.executor import Executor, RankProgram
from motet.runtime.messages import Messages
from motet.runtime.p2p import Lanes
from motet.runtime.place import answered_sends
from motet.runtime.tensors import StageTensors
from motet.schedule import (
    Kind,
    add_communication,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    planned,
    validate,
    zb_h1,
    zb_v,
)
from motet.schedule.coordinates import RankLink
from motet.simulate.filling.step_filler import StepFiller
from ranks import RankFailed, run_ranks
from unit.schedule.plans import PLANS
from unit.simulate.filling.filled_steps import FILLED, step_of

CPU = torch.device("cpu")
WIDTH = 2**18
"""Elements of a message: 2 MB, more than any buffer on the way."""
TIMES_LONGER = 10
"""An order that has not ended in so many times the time of the right one hangs."""


class Posted:
    """A `Work` of a lane's thread. later: what is posted only when it is waited for."""

    def __init__(self, lane, call, later=False):
        self._start = lambda: lane.submit(call)
        self._work = None if later else self._start()

    def is_completed(self):
        return self._work is not None and self._work.done()

    def wait(self):
        self._work = self._work or self._start()
        self._work.result()


class StrictLanes(Lanes):
    """joint: one thread serves both directions of a pair, in the order of the row."""

    def __init__(self, pairs, rank, joint=False):
        super().__init__(pairs, rank, CPU)
        self._joint = joint
        key = frozenset if joint else tuple
        threads = {key(pair): ThreadPoolExecutor(1) for pair in pairs if rank in pair}
        self._threads = {pair: threads[key(pair)] for pair in pairs if rank in pair}

    def _isend(self, message, receiver):
        pair = self._rank, receiver
        return Posted(self._threads[pair], lambda: dist.send(message, receiver, group=self._groups[pair]))

    def irecv(self, message, sender):
        pair = sender, self._rank
        return Posted(self._threads[pair], lambda: dist.recv(message, sender, group=self._groups[pair]), self._joint)


def content(kind, stage, microbatch):
    return float(1000 * stage + 10 * microbatch + (kind is Kind.B) + 1)


def walk(program, rank, lanes, device=CPU, width=WIDTH):
    """Execute a rank's row; passes compare what has arrived, and make what is sent."""
    edges = {ends: number for number, ends in enumerate(program.edges)}
    row = RankProgram(program.actions[rank], {n: stage.module for n, stage in enumerate(program.stages)}, {})
    has_backward = {action.stage for row in program.actions for action in row if action.kind in (Kind.B, Kind.I)}
    tensors = StageTensors()

    def parts(edge, microbatch, shares):
        source = program.edges[edge][0]
        return [MessagePart(str(source), width, None, 1, 1, source in has_backward)]

    place = SimpleNamespace(
        row=row,
        edges=edges,
        c=0,
        program_rank_of=lambda stage: program.stages[stage].rank,
        senders=lambda action: [RankLink(program.stages[action.peer].rank, rank, (0, 0))],
        receivers=lambda action: [RankLink(rank, program.stages[action.peer].rank, (0, 0))],
        local_edges={},
        answered=answered_sends(program, rank),
    )
    messages = Messages(place, lanes, parts, tensors, torch.empty(0, dtype=torch.float64, device=device))

    def made(kind, stage, microbatch):
        return torch.full((1, width), content(kind, stage, microbatch), dtype=torch.float64, device=device)

    def forward(action):
        key = action.stage, action.microbatch
        for source, rows in tensors.inputs.pop(key, {}).items():
            assert rows.unique().tolist() == [content(Kind.F, int(source), action.microbatch)], action
        messages.made_outputs(*key, {str(action.stage): made(Kind.F, *key)})

    def backward(action):
        key = action.stage, action.microbatch
        for gradient in tensors.output_gradients.pop(key, {}).values():
            sinks = [sink for source, sink in program.edges if source == action.stage]
            crossing = [sink for sink in sinks if program.stages[sink].rank != rank]
            crossing = [sink for sink in crossing if program.stages[sink].takes(action.microbatch)]
            assert gradient.unique().tolist() == [sum(content(Kind.B, sink, action.microbatch) for sink in crossing)]
        sources = [source for source, sink in program.edges if sink == action.stage]
        messages.made_gradients(*key, {str(source): made(Kind.B, *key) for source in sources})

    def nothing(action):
        pass

    passes = dict.fromkeys(Kind, nothing) | {Kind.F: forward, Kind.B: backward, Kind.I: backward}
    Executor(row, {**passes, **messages.handlers}, ActionClock(rank, device)).run(0)
    lanes.wait_for_sends()
    assert not (tensors.inputs or tensors.outputs or tensors.output_gradients or tensors.input_gradients)


def pairs_of(programs):
    return sorted(
        {
            ends
            for program in programs
            for a, b in program.edges
            for ends in (
                (program.stages[a].rank, program.stages[b].rank),
                (program.stages[b].rank, program.stages[a].rank),
            )
            if ends[0] != ends[1]
        }
    )


def walk_all(rank, num_ranks, programs, joint):
    lanes = StrictLanes(pairs_of(programs), rank, joint)
    for program in programs:
        if rank < program.num_ranks:
            walk(program, rank, lanes)
        dist.barrier()


def walk_wrong(rank, num_ranks, right, wrong, folder):
    """Rank 0 writes whether the second program hangs, and ends; the first says how long such a program takes."""
    lanes = StrictLanes(pairs_of([right]), rank, joint=True)
    started_s = time.monotonic()
    walk(right, rank, lanes)
    dist.barrier()
    took_s = time.monotonic() - started_s
    walker = threading.Thread(target=walk, args=(wrong, rank, lanes), daemon=True)
    walker.start()
    walker.join(max(5, TIMES_LONGER * took_s) if rank == 0 else None)
    (Path(folder) / f"rank {rank}").write_text("hangs" if walker.is_alive() else "has ended")
    os._exit(0)


SIZES = [(2, 3), (4, 6)]


def generated():
    for p, m in SIZES:
        for generate in (gpipe, one_f_one_b, zb_h1, zb_v):
            yield generate(p, m)
        for deferred in (False, True):
            yield interleaved_1f1b(p, 2, m, deferred_warmup=deferred)


@pytest.mark.parametrize("blocking", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_schedule_ends_on_lanes_that_block(blocking):
    """Orders for ranks that block need no lane for each direction."""
    programs = [add_communication(program, blocking=blocking) for program in generated()]
    run_ranks(walk_all, 4, programs, blocking)


@pytest.mark.slow
def test_every_strategy_ends_on_lanes_that_block():
    programs = [planned(plan).program for name, plan in PLANS.items() if name != "fsdp"]
    for program in programs:
        validate(program)
    run_ranks(walk_all, max(program.num_ranks for program in programs), programs, False)


def whole(program):
    """The Program with each pass where its last part is: parts change no message."""
    last = {action[:3]: action.part for row in program.actions for action in row}
    return program.with_rows(
        lambda row: (action._replace(part=-1) for action in row if action.part in (-1, last[action[:3]]))
    )


@pytest.mark.slow
def test_fills_of_steps_end_on_lanes_that_block():
    """Programs that are decided from the lengths of a step; other messages are sent in each."""
    programs = []
    for plan in FILLED.values():
        steps = (step_of(plan, np.random.default_rng(seed)) for seed in range(2))
        programs += [whole(StepFiller(planned(plan)).program(step, 0).program) for step in steps]
    run_ranks(walk_all, max(program.num_ranks for program in programs), programs, False)


@pytest.mark.slow
def test_one_lane_for_both_directions_of_a_pair_hangs(tmp_path):
    right, wrong = (add_communication(one_f_one_b(2, 4), blocking=blocking) for blocking in (True, False))
    with pytest.raises(RankFailed, match="died with exit code 0"):
        run_ranks(walk_wrong, 2, right, wrong, str(tmp_path))
    assert (tmp_path / "rank 0").read_text() == "hangs"
