"""Plans over NCCL on two GPUs: exact, with messages beyond NCCL's buffers, and with messages beside computation."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from dist.test_strict_lanes import generated, pairs_of, walk
from motet.runtime.p2p import Lanes
from motet.schedule import add_communication, planned, validate
from parity import (
    test_bubbles,
    test_context,
    test_cut_sequences,
    test_divided_data_parallel,
    test_experts,
    test_generators,
    test_pairs,
    test_planned,
    test_schedules,
    test_split_plans,
    test_tensor_parallel_plans,
)
from parity.planned import assert_planned, rank_device
from ranks import run_ranks
from unit.schedule.plans import PLANS

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
FOUR_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")
BEYOND_BUFFERS = 2**22
"""Elements of a message: 32 MB, eight times the buffer of an NCCL channel."""
BUSY_CYCLES = 10_000_000_000
"""Some seconds of a GPU."""
CASES = {
    "chain": test_planned.CASES,
    "interleaved": test_schedules.cases_of("interleaved_1f1b", 2),
    "deferred": test_schedules.cases_of("interleaved_1f1b", 2, deferred_warmup=True),
    "zb_h1": test_schedules.cases_of("zb_h1", 2),
    "zb_v": [*test_schedules.cases_of("zb_v", 2), *test_schedules.ENDS_TOGETHER],
    "bubbles": [*test_bubbles.CASES_OF_2, *test_bubbles.OWN[2]],
    "replicated": test_pairs.CASES[2],
    "cp": test_context.OF_BACKBONES[2],
    "cp in groups of heads": test_context.IN_HEAD_GROUPS,
    "cp that cuts images": test_context.LARGE[2],
    "sequences that replicas share": test_split_plans.CASES[2],
    "cp before generators": test_generators.SHARED[2],
    "generators that are cut": test_generators.CUT[2],
    "tp": [
        *test_tensor_parallel_plans.families(test_tensor_parallel_plans.chain(test_tensor_parallel_plans.ALL)),
        *test_tensor_parallel_plans.families(
            test_tensor_parallel_plans.chain(test_tensor_parallel_plans.ALL, recompute=({"image": 2, "backbone": 2},))
        ),
    ],
    "tp in chunks": test_tensor_parallel_plans.IN_CHUNKS,
    "tp under data parallelism": test_divided_data_parallel.CASES[2],
    "ep": [*test_experts.CASES[2], *test_experts.SPREAD[2], *test_experts.SPREAD_IN_DATA_PARALLEL[2]],
}
OF_FOUR = {
    "cp": test_context.OF_BACKBONES[4],
    "encoders cp": test_context.OF_ENCODERS[4],
    "tp under data parallelism": test_divided_data_parallel.CASES[4],
    "cp that cuts images": test_context.LARGE[4],
    "sequences that replicas share": test_split_plans.CASES[4],
    "ep": [*test_experts.SPREAD[4], *test_experts.SPREAD_IN_DATA_PARALLEL[4]],
    "ep and tp": test_experts.SPREAD_AND_DIVIDED[4],
    "fills inside passes": test_tensor_parallel_plans.CASES_INSIDE,
    "sums apart": test_tensor_parallel_plans.CASES_WITH_SUMS,
}


@TWO_GPUS
@pytest.mark.parametrize("kind", CASES)
def test_steps_equal_one_process(kind):
    assert_planned(2, CASES[kind], on_gpus=True)


@FOUR_GPUS
@pytest.mark.parametrize("kind", OF_FOUR)
def test_steps_of_four_equal_one_process(kind):
    assert_planned(4, OF_FOUR[kind], on_gpus=True)


@FOUR_GPUS
@pytest.mark.parametrize("cuts", ["CUTS", "ITEMS"])
def test_steps_that_cut_items_equal_one_process(cuts):
    cases = getattr(test_cut_sequences, cuts)
    assert run_ranks(test_cut_sequences.check, 4, cases, on_gpus=True) == [[]] * 4


@TWO_GPUS
def test_what_is_chosen_to_be_cut_equals_one_process():
    assert run_ranks(test_cut_sequences.check, 2, test_cut_sequences.CHOSEN, on_gpus=True) == [[]] * 2


def walk_all(rank, num_ranks, programs, width):
    lanes = Lanes(pairs_of(programs), rank, rank_device())
    lanes.connect()
    for program in programs:
        walk(program, rank, lanes, rank_device(), width)
        dist.barrier()


def programs_of(num_ranks):
    """Those of every schedule and every strategy that have so many ranks."""
    programs = [add_communication(program, blocking=False) for program in generated()]
    programs += [planned(plan).program for name, plan in PLANS.items() if name != "fsdp"]
    return [program for program in programs if program.num_ranks == num_ranks]


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(count, marks=pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"fewer than {count}"))
        for count in (2, 4)
    ],
)
def test_every_program_ends_with_messages_beyond_the_buffers(num_ranks):
    programs = programs_of(num_ranks)
    assert programs
    for program in programs:
        validate(program)
    run_ranks(walk_all, num_ranks, programs, BEYOND_BUFFERS, on_gpus=True)


def beside_computation(rank, num_ranks):
    """Whether a message arrives before the end of the computation that begins behind it, as both ranks see it."""
    lanes, host = Lanes([(0, 1)], rank, rank_device()), dist.new_group(backend="gloo")
    lanes.connect()
    message, has_arrived, computed = torch.zeros(1, device=rank_device()), torch.zeros(1), torch.cuda.Event()
    received = None
    if rank == 0:
        lanes.send(message, 1)
    else:
        received = lanes.irecv(message, 0)
    torch.cuda._sleep(BUSY_CYCLES)
    computed.record()
    if received is None:
        dist.recv(has_arrived, 1, group=host)
    else:
        while not received.is_completed():
            time.sleep(1e-3)
        dist.send(has_arrived, 0, group=host)
    return not computed.query()


@TWO_GPUS
def test_messages_travel_beside_computation():
    assert run_ranks(beside_computation, 2, on_gpus=True) == [True, True]
