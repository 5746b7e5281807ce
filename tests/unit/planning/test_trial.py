"""Trials on two ranks: what one of them meets, both are outcomes, whatever the other one is waiting for."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from motet.core.errors import UserError
from motet.planning.trial import OutOfMemory, open_trials
from motet.train.world import join_world
from ranks import TIMEOUT_S, run_ranks


def task(meeting, what):
    """Sums ranks; or meets what is said, on rank 1, while rank 0 waits for it."""
    with join_world("cpu", meeting) as world:
        if world.rank == 1:
            if what == "wrong":
                raise UserError("This is wrong.")
            if what == "memory":
                torch.empty(1 << 60)
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "failed":
                raise ZeroDivisionError("by nothing")
        if what != "nothing":
            time.sleep(TIMEOUT_S)
        total = torch.tensor(world.rank + 1)
        dist.all_reduce(total)
        return int(total), os.getpid()


def run(rank, num_ranks, *whats, used=None):
    """How each trial ended on this rank: its answers and the number of its processes, or its error."""
    outcomes = []
    with join_world("cpu") as world, open_trials(world, __name__) as trials:
        for what in whats:
            try:
                totals, pids = zip(*trials.run(task, what, used), strict=True)
                outcomes.append((totals, len(set(pids))))
            except (OutOfMemory, UserError, RuntimeError) as error:
                outcomes.append((type(error).__name__, str(error).strip().splitlines()[-1:]))
    return outcomes


@pytest.mark.slow
def test_trials_end_alike_on_all_ranks_and_the_next_one_starts_anew():
    whats = ("nothing", "memory", "nothing", "killed", "wrong", "failed", "nothing")
    (one, other) = run_ranks(run, 2, *whats)
    assert one == other
    done = ((3, 3), 2)
    no_memory = ("OutOfMemory", [])
    wrong = ("JointUserError", ["This is wrong."])
    failed = ("RuntimeError", ["ZeroDivisionError: by nothing"])
    assert one == [done, no_memory, done, no_memory, wrong, failed, done]


def run_on_last(rank, num_ranks):
    return run(rank, num_ranks, "nothing", used=[num_ranks - 1])


def test_ranks_that_a_trial_leaves_over_wait_for_its_answers():
    assert run_ranks(run_on_last, 2) == [[((1,), 1)]] * 2
