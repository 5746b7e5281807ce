"""Copies between GPUs of a node: the bits of NCCL's collectives, at once and beside computation; steps are exact."""

import pytest
import torch
import torch.distributed as dist

from dist.test_peer_copies import _drawn, _in_order
from parity import test_tensor_parallel_plans
from parity.planned import assert_planned, rank_device
from peer_memory import opening_copies
from ranks import run_ranks

BUSY_CYCLES = 1_000_000_000
"""About half a second of a GPU."""
WIDTH = 1024


def on(num_gpus):
    """Ranks of so many GPUs, if there are."""
    few = pytest.mark.skipif(torch.cuda.device_count() < num_gpus, reason=f"fewer than {num_gpus} CUDA devices")
    return pytest.param(num_gpus, marks=few)


def messages(rank, num_ranks):
    """Messages that came otherwise than NCCL's, or than their sum in the order of ranks."""
    device, wrong = rank_device(), []
    sent = opening_copies(device)(dist.group.WORLD)
    for number, rows in enumerate([3, 5, 300, 7, 900]):
        for dtype in (torch.float32, torch.bfloat16):
            of_ranks = _drawn(num_ranks, rows, WIDTH, dtype, number).to(device)
            own, total, parts = of_ranks[rank], _in_order(of_ranks), of_ranks[:, :rows].contiguous()
            # Some ranks are late, each time others: they write and read beside ranks that are far ahead.
            if (rank + number) % 2:
                torch.cuda._sleep(BUSY_CYCLES // 100)
            every, part, all_rows = torch.empty_like(own), torch.empty_like(own[:rows]), own.clone()
            by_nccl = torch.empty_like(part)
            dist.reduce_scatter_single(by_nccl, own)
            started = sent.all_gather(every, parts[rank]), sent.reduce_scatter(part, own), sent.all_reduce(all_rows)
            for message in started:
                message.wait()
            found = {"all_gather": every, "reduce_scatter": part, "all_reduce": all_rows}
            expected = {"all_gather": parts.flatten(0, 1), "reduce_scatter": total.chunk(num_ranks)[rank]}
            expected["all_reduce"] = total
            wrong += [f"{name} of {rows} rows" for name in found if not torch.equal(found[name], expected[name])]
            if num_ranks == 2 and not torch.equal(part, by_nccl):
                wrong.append(f"NCCL's sum of {rows} rows")
    return wrong


@pytest.mark.parametrize("num_ranks", [on(2), on(4)])
def test_messages_have_the_bits_of_the_undivided_sum(num_ranks):
    assert run_ranks(messages, num_ranks, on_gpus=True) == [[]] * num_ranks


def beside_computation(rank, num_ranks):
    """Whether a message that is started before a long computation has come before that ends."""
    sent = opening_copies(rank_device())(dist.group.WORLD)
    every, part = (torch.zeros(rows, WIDTH, device=rank_device()) for rows in (num_ranks * 64, 64))
    sent.all_gather(every, part).wait()  # Kernels are loaded.
    torch.cuda.synchronize()
    dist.barrier()
    message, computed = sent.all_gather(every, part), torch.cuda.Event()
    torch.cuda._sleep(BUSY_CYCLES)
    computed.record()
    message.synchronize()
    return not computed.query()


@pytest.mark.parametrize("num_ranks", [on(2)])
def test_messages_travel_beside_computation(num_ranks):
    assert run_ranks(beside_computation, num_ranks, on_gpus=True) == [True] * num_ranks


@pytest.mark.parametrize("num_ranks", [on(2), on(4)])
def test_steps_equal_one_process(num_ranks):
    cases = {2: test_tensor_parallel_plans.COPIED, 4: test_tensor_parallel_plans.COPIED_OF_4}
    assert_planned(num_ranks, cases[num_ranks], on_gpus=True)
