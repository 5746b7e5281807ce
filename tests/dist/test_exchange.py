"""Rows between ranks: values, gradients, element types, ranks with nothing, and no collective where nothing moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.balance import score
from motet.core.workload import ItemLengths
from motet.dispatch import compose_route, exchange, exchange_rows
from ranks import run_ranks

NUM_TOKENS = np.array([2, 0, 3, 1, 4])
EXAMPLES = np.array([0, 0, 1, 3, 3])

# Where the five items are encoded, and where the four examples run; with three ranks.
PLACEMENTS = {
    "everything moves": ([1, 1, 2, 0, 0], [0, 0, 1, 1]),
    "one rank has it all": ([0, 0, 0, 0, 0], [2, 2, 2, 2]),
    "nothing moves": ([0, 0, 1, 2, 2], [0, 1, 0, 2]),
    "mixed": ([0, 1, 2, 0, 2], [0, 1, 2, 2]),
}


def route_of(name: str, rank: int, num_ranks: int, communicator: str = "all_to_all"):
    encoder, backbone = (score(np.array(p), np.ones(len(p), np.int64), num_ranks) for p in PLACEMENTS[name])
    items = ItemLengths(EXAMPLES, np.ones(5, np.int64), NUM_TOKENS)
    rows = [(item, row) for item in encoder.on_rank(rank) for row in range(NUM_TOKENS[item])]
    arriving = [
        (item, row)
        for example in backbone.on_rank(rank)
        for item in np.flatnonzero(example == EXAMPLES)
        for row in range(NUM_TOKENS[item])
    ]
    return compose_route(encoder, backbone, items, rank, communicator=communicator), rows, arriving


def named_rows(names, dtype) -> torch.Tensor:
    return torch.tensor([[10.0 * item + row, 1 + row] for item, row in names], dtype=dtype).reshape(-1, 2)


def check_exchange(rank: int, num_ranks: int, communicator: str) -> list[str]:
    wrong = []
    for name in PLACEMENTS:
        route, leaving, arriving = route_of(name, rank, num_ranks, communicator)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            rows, expected = named_rows(leaving, dtype), named_rows(arriving, dtype)
            if not torch.equal(exchange_rows(rows, route, dist.group.WORLD), expected):
                wrong.append(f"{name}, {dtype}: rows")
            # A rank without rows has, as in practice, nothing that requires a gradient.
            rows.requires_grad_(len(rows) > 0)
            moved = exchange(rows, route, dist.group.WORLD)
            (moved * expected).sum().backward()
            if len(rows) and not torch.equal(rows.grad, rows.detach()):
                wrong.append(f"{name}, {dtype}: gradients")
    return wrong


@pytest.mark.parametrize("communicator", ["all_to_all", "all_gather"])
def test_rows_and_gradients_on_three_ranks(communicator):
    assert run_ranks(check_exchange, 3, communicator) == [[], [], []]


def check_silence(rank: int, num_ranks: int) -> int:
    """Rank 0 alone calls a local exchange: it would hang if that took part in a collective."""
    route, leaving, arriving = route_of("nothing moves", rank, num_ranks)
    if rank == 0:
        rows = named_rows(leaving, torch.float32).requires_grad_()
        exchange(rows, route, None).sum().backward()
        return len(rows.grad)
    return len(arriving)


def test_local_exchange_needs_no_other_rank():
    assert run_ranks(check_silence, 3) == [2, 3, 5]


def test_wrong_number_of_rows_is_refused():
    route, _, _ = route_of("mixed", 0, 3)
    with pytest.raises(ValueError, match="the route moves 3 rows, 5 were given"):
        exchange_rows(torch.zeros(5, 2), route, None)
    with pytest.raises(ValueError, match="no process group"):
        exchange_rows(torch.zeros(3, 2), route, None)
    gathering, _, _ = route_of("mixed", 0, 3, "all_gather")
    with pytest.raises(ValueError, match="the route moves 3 rows, 5 were given"):
        exchange_rows(torch.zeros(5, 2), gathering, None)
    with pytest.raises(ValueError, match="no process group"):
        exchange_rows(torch.zeros(3, 2), gathering, None)
