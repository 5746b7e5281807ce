"""The means by which all other tests run on several ranks: results, failures and hangs are all seen."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, RanksHung, run_ranks


def _sum_of_ranks(rank, num_ranks, offset):
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return rank, num_ranks, value, torch.get_num_threads()


def test_results_come_in_rank_order():
    results = run_ranks(_sum_of_ranks, 3, torch.tensor(10))
    assert [(rank, size, value.item()) for rank, size, value, _ in results] == [(0, 3, 33), (1, 3, 33), (2, 3, 33)]
    assert {threads for *_, threads in results} == {1}


def test_starting_ranks_is_cheap():
    run_ranks(_sum_of_ranks, 2, 0)  # starts the server, where no test has yet
    start = time.monotonic()
    run_ranks(_sum_of_ranks, 4, 0)
    assert time.monotonic() - start < 5


def _fail_on_rank_1(rank, num_ranks):
    if rank == 1:
        raise ValueError("rank 1 does not like this")
    dist.barrier()


def test_failing_rank_shows_its_traceback():
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1: .*in _fail_on_rank_1.*ValueError: rank 1 does not like this"):
        run_ranks(_fail_on_rank_1, 2)
    assert time.monotonic() - start < 30


def _die_on_rank_1(rank, num_ranks):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_dying_rank_is_reported():
    with pytest.raises(RankFailed, match="rank 1: died with exit code 7"):
        run_ranks(_die_on_rank_1, 2)


def _report_pid_then_hang_rank_1(rank, num_ranks, folder):
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        _sleep_for_ever()
    dist.barrier()


def _sleep_for_ever():
    while True:
        time.sleep(1)


def test_hang_shows_every_stack_and_leaves_no_process(tmp_path):
    with pytest.raises(RanksHung, match=r"(?s)ranks \[0, 1\] still ran.*rank 0:.*barrier.*rank 1:.*_sleep_for_ever"):
        run_ranks(_report_pid_then_hang_rank_1, 2, tmp_path, timeout_s=4)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
