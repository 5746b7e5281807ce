"""Items over the links of GPUs: by NCCL, on a communicator and a stream of their own, in a thread beside the step's."""

from __future__ import annotations

import tempfile
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dist.test_items import check_batch
from motet.dispatch import Carrier
from ranks import run_ranks

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def test_bytes_go_to_the_device_and_back():
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            carrier = Carrier(dist.new_group(backend="nccl"), device)
            outgoing = carrier.buffer(1000)
            outgoing[:] = np.arange(1000) % 251
            expected = outgoing.copy()
            assert np.array_equal(carrier.all_to_all(outgoing, [1000], [1000]), expected)
            assert np.array_equal(carrier.all_gather(outgoing, 1000), expected)
        finally:
            dist.destroy_process_group()


def check_beside_a_step(rank: int, num_ranks: int, seeds: list[int]) -> list[str]:
    """Exchanges in a thread, while the main thread computes and reduces on the communicator of the step."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    step, items = dist.new_group(backend="nccl"), dist.new_group(backend="nccl")
    host, carrier = dist.new_group(backend="gloo"), Carrier(items, device)
    wrong: list[str] = []

    def work():
        for seed in seeds:
            wrong.extend(check_batch(rank, num_ranks, host, seed, carrier))

    thread = threading.Thread(target=work)
    thread.start()
    total = torch.ones(512, 512, device=device)
    for _ in range(200):
        total = total @ total / 512
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=step)
    torch.cuda.synchronize()
    thread.join()
    return wrong if bool((total == 1).all()) else [*wrong, "the step was disturbed"]


@TWO_GPUS
def test_items_arrive_whole_while_a_step_runs():
    assert run_ranks(check_beside_a_step, 2, list(range(30))) == [[], []]
