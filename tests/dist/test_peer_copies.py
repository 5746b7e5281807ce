"""Collectives by copies out of other ranks' memory, over files that CPU ranks map: the code that runs on GPUs."""

import itertools

import pytest
import torch
import torch.distributed as dist

from motet.core.errors import UserError
from motet.peer_copies import PeerCopies, open_copies, why_apart
from peer_memory import copies
from ranks import run_ranks

SIZES = [(5, 3), (1, 1), (70, 31), (16, 7), (3, 900), (100, 20)]
"""(rows of a rank, columns): the memory grows, and is used for smaller messages again behind that."""


def _drawn(num_ranks, rows, columns, dtype, seed):
    """What each rank has, of very different sizes, so that another order of a sum has other bits."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_ranks, num_ranks * rows, columns
    return (torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)).to(dtype)


def _in_order(of_ranks):
    """The sum in the order of ranks."""
    total = of_ranks[0].clone()
    for other in of_ranks[1:]:
        total += other
    return total


def _wrong(rank, num_ranks, sent, delays=()):
    """The messages that came otherwise than they should: all three collectives of every size, in every type."""
    wrong = []
    types = torch.float64, torch.float32, torch.bfloat16
    for number, ((rows, columns), dtype) in enumerate(itertools.product(SIZES, types)):
        of_ranks = _drawn(num_ranks, rows, columns, dtype, number)
        own, total = of_ranks[rank], _in_order(of_ranks)
        parts = of_ranks[:, :rows]
        every, part, all_rows = torch.empty_like(own), torch.empty_like(own[:rows]), own.clone()
        # All are on their way before the first is waited for.
        messages = sent.all_gather(every, parts[rank]), sent.reduce_scatter(part, own), sent.all_reduce(all_rows)
        for message in messages:
            message.wait()
        expected = {
            "all_gather": parts.flatten(0, 1),
            "reduce_scatter": total.chunk(num_ranks)[rank],
            "all_reduce": total,
        }
        for (name, right), found in zip(expected.items(), (every, part, all_rows), strict=True):
            if not torch.equal(found, right):
                wrong.append(f"{name} of {rows} x {columns} in {dtype}")
    return wrong


def _messages(rank, num_ranks, delays=()):
    return _wrong(rank, num_ranks, copies(dist.group.WORLD, delays))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_they_are_those_of_the_undivided_sum_in_the_order_of_ranks(num_ranks):
    assert run_ranks(_messages, num_ranks) == [[]] * num_ranks


DELAYS = [(0.02, 0.0), (0.0, 0.02), (0.02, 0.0, 0.01)]


@pytest.mark.parametrize("delays", DELAYS, ids=str)
def test_a_rank_that_reads_late_reads_the_same(delays):
    num_ranks = len(delays)
    assert run_ranks(_messages, num_ranks, delays) == [[]] * num_ranks


def _on_one_half(rank, num_ranks, delays):
    class OneHalf(PeerCopies):
        _is_second = property(lambda self: False, lambda self, value: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peer_memory.PeerCopies", OneHalf)
        return _messages(rank, num_ranks, delays)


def test_the_delay_shows_a_rank_that_writes_what_another_still_reads():
    """Else the test above could not fail."""
    assert any(run_ranks(_on_one_half, 2, DELAYS[0]))


def _allocated(rank, num_ranks):
    sent, sizes = copies(dist.group.WORLD), []
    allocate = sent._allocate
    sent._allocate = lambda num_bytes: (sizes.append(num_bytes), allocate(num_bytes))[1]
    for _ in range(3):
        assert _wrong(rank, num_ranks, sent) == []
    return sizes


def test_memory_grows_by_powers_of_two_and_is_kept_from_step_to_step():
    first, second = run_ranks(_allocated, 2)
    largest = 2 * max(rows * columns for rows, columns in SIZES) * 8
    assert first == second == sorted(set(first)) and largest <= first[-1] // 2 < 2 * largest
    assert all(size & (size - 1) == 0 for size in first)


def _on_a_cpu(rank, num_ranks):
    with pytest.raises(UserError, match="this run is on cpu, not on CUDA devices; plan with "):
        open_copies(dist.group.WORLD, torch.device("cpu"), None)


def test_a_cpu_has_no_copy_engines():
    run_ranks(_on_a_cpu, 2)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ([(4, "a", 0, [1, 2]), (5, "a", 1, [0, 2]), (6, "a", 2, [0, 1])], ""),
        ([(4, "a", 0, [1]), (5, "b", 1, [0])], "rank 4 is on a and rank 5 on b"),
        (
            [(4, "a", 0, []), (5, "a", 0, [])],
            "ranks 4 and 5 both have device 0 (each must see all of them: CUDA_VISIBLE_DEVICES)",
        ),
        ([(4, "a", 0, [1]), (5, "a", 1, [])], "device 1 of rank 5 cannot read that of rank 4"),
    ],
)
def test_why_ranks_cannot_read_each_others_memory(seen, why):
    assert why_apart(seen) == why
