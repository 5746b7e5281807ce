"""The means by which all other tests run on several ranks: results, failures and hangs are all seen."""

import os
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist

from ranks import PRELOADED, RankFailed, RanksHung, run_ranks


def _sum_of_ranks(rank, num_ranks, offset):
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return rank, num_ranks, value, torch.get_num_threads()


def test_results_come_in_rank_order():
    results = run_ranks(_sum_of_ranks, 3, torch.tensor(10))
    assert [(rank, size, value.item()) for rank, size, value, _ in results] == [(0, 3, 33), (1, 3, 33), (2, 3, 33)]
    assert {threads for *_, threads in results} == {1}


def _parent_and_what_is_not_imported(rank, num_ranks):
    return os.getppid(), set(PRELOADED) - set(sys.modules)


def test_ranks_are_forked_from_one_server_that_has_imported_torch():
    told = [each for num_ranks in (2, 4) for each in run_ranks(_parent_and_what_is_not_imported, num_ranks)]
    (server,) = {parent for parent, _ in told}
    assert server != os.getpid()
    assert all(not missing for _, missing in told)


def _fail_on_rank_1(rank, num_ranks):
    if rank == 1:
        raise ValueError("rank 1 does not like this")
    _sleep_for_ever()


def test_failing_rank_shows_its_traceback_and_is_not_waited_for():
    with pytest.raises(RankFailed, match=r"(?s)rank 1: .*in _fail_on_rank_1.*ValueError: rank 1 does not like this"):
        run_ranks(_fail_on_rank_1, 2, timeout_s=3600)  # Longer than a test may take.


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
    # Ranks that are slow to start hang before they come to the function: they are given more time, and tried again.
    for timeout_s in (2, 10, 50):
        with pytest.raises(RanksHung, match=r"ranks \[0, 1\] still ran") as hung:
            run_ranks(_report_pid_then_hang_rank_1, 2, tmp_path, timeout_s=timeout_s)
        if re.search(stacks := r"(?s)rank 0:.*barrier.*rank 1:.*_sleep_for_ever", str(hung.value)):
            break
    assert re.search(stacks, str(hung.value))
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
