"""A loop of one's own in which each rank has a loader over examples that no other rank has."""

import importlib.util
from itertools import pairwise, zip_longest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset

from motet.dispatch import ItemExchange, Orchestrator, Packed, assemble
from ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
SIZES = (10, 4)
"""Examples of each rank: the second rank has none left for the last steps."""


def loaders(own_loop):
    """The loader of each rank."""
    ends = [sum(SIZES[:rank]) for rank in range(len(SIZES) + 1)]
    splits = [range(start, end) for start, end in pairwise(ends)]
    return [DataLoader(Subset(own_loop.Examples(), split), 2, collate_fn=list) for split in splits]


def losses(rank: int, num_ranks: int, communicator: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    own_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_loop)
    torch.manual_seed(0)
    group, model = dist.group.WORLD, fully_shard(own_loop.Model().double())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    phases = {"backbone": Packed(), "image": Packed()}
    orchestrator = Orchestrator(phases, num_ranks, phases, communicator=communicator)
    bring = ItemExchange(dist.new_group(backend="gloo"), orchestrator, {"image": own_loop.PATCHES})
    if num_ranks == 1:
        steps = ([e for part in parts for e in part or []] for parts in zip_longest(*loaders(own_loop)))
    else:
        num_steps = torch.tensor(len(loader := loaders(own_loop)[rank]))
        dist.all_reduce(num_steps, op=dist.ReduceOp.MAX)
        own = iter(loader)
        steps = (next(own, []) for _ in range(num_steps))
    found = []
    for examples in steps:
        items = bring(examples)
        batch = assemble(items.decision, items.lengths, rank, items.sequences, items.media)
        loss = model(batch.to("cpu", dtype=torch.float64), group) / batch.num_targets
        (loss * num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        found.append(loss.item())
    return found


@pytest.mark.parametrize("communicator", ["all_to_all", "all_gather"])
def test_losses_are_those_of_one_rank_that_loads_all(communicator):
    (expected,) = run_ranks(losses, 1, communicator)
    by_rank = run_ranks(losses, 2, communicator)
    assert len(expected) == 5
    assert by_rank[0] == by_rank[1] == pytest.approx(expected, rel=1e-10)
