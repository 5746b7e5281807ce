"""Collectives by copies out of other ranks' memory, over files that CPU ranks map: the code that runs on GPUs."""

import itertools
import math
from contextlib import contextmanager
from datetime import timedelta

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


def _on_gpus(rank, num_ranks, reaches):
    """What is refused on a machine of GPUs that a torch without CUDA cannot use. reaches: of each rank, by device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.device_count", lambda: num_ranks)
        patch.setattr("torch.cuda.can_device_access_peer", lambda own, other: reaches[own][other])
        with pytest.raises(UserError) as refused:
            open_copies(dist.group.WORLD, torch.device("cuda", rank), timedelta(seconds=1))
    return str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use CUDA devices here")
def test_what_gpus_cannot_do_is_one_sentence_on_all_ranks():
    said = run_ranks(_on_gpus, 2, [[False, True], [False, False]])
    asked = (
        'cluster has tensor_transport "copy_engines", by which tensor-parallel ranks read each other\'s memory, and '
    )
    instead = '; plan with cluster.tensor_transport = "collectives".'
    assert said == [f"The plan's {asked}device 1 of rank 1 cannot read that of rank 0{instead}"] * 2
    for text in run_ranks(_on_gpus, 2, [[False, True], [True, False]]):
        assert f"{asked}torch's symmetric memory fails here (" in text and text.endswith(f"){instead}")
        assert "\n" not in text


class Streams:
    """CUDA streams without a GPU: which one each operation is put into, and which one waits for which."""

    def __init__(self):
        self.log, self.current = [], self.Stream(self, "compute")

    class Stream:
        def __init__(self, streams, name):
            self.streams, self.name, self.device = streams, name, torch.device("cuda", 0)

        def wait_stream(self, other):
            self.streams.log.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            self.streams.log.append(f"{self.name} is marked")
            return self

        def wait(self):
            self.streams.log.append(f"{self.streams.current.name} waits for the mark")

        def synchronize(self):
            self.streams.log.append(f"the host waits for {self.name}")

    @contextmanager
    def using(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def patch(self, patch):
        patch.setattr("torch.cuda.Stream", lambda device, priority: self.Stream(self, "copies"))
        patch.setattr("torch.cuda.stream", self.using)
        patch.setattr("torch.cuda.current_stream", lambda device: self.current)


class LoggedMemory:
    """Memory of one rank, which stands for the other, too."""

    def __init__(self, streams, num_bytes):
        self.streams, self.bytes = streams, torch.zeros(num_bytes, dtype=torch.uint8)
        streams.log.append(f"{streams.current.name} allocates {num_bytes}")

    def get_buffer(self, rank, sizes, dtype, storage_offset):
        self.streams.log.append(f"{self.streams.current.name} reaches for rank {rank}")
        return self.bytes.view(dtype)[storage_offset:][: math.prod(sizes)].view(sizes)

    def barrier(self):
        self.streams.log.append(f"{self.streams.current.name} meets")


def test_on_a_gpu_messages_are_on_a_stream_of_their_own(monkeypatch):
    streams = Streams()
    streams.patch(monkeypatch)
    monkeypatch.setattr("motet.peer_copies.LEAST_BYTES", 64)
    sent = PeerCopies(0, 2, torch.device("cuda", 0), lambda num_bytes: LoggedMemory(streams, num_bytes))
    begun = ["copies waits for compute"]
    exchange = ["copies reaches for rank 0", "copies meets", "copies reaches for rank 1", "copies is marked"]
    sent.all_gather(torch.empty(8), torch.empty(4)).wait()
    assert streams.log == [*begun, "copies allocates 128", *begun, *exchange, "compute waits for the mark"]
    streams.log.clear()
    sent.reduce_scatter(torch.empty(10), torch.empty(20)).wait()
    grown = ["copies meets", "the host waits for copies", "copies allocates 256"]
    assert streams.log == [*begun, *grown, *exchange, "compute waits for the mark"]


def test_torch_has_the_symmetric_memory_that_is_used():
    """It is private, or called alpha: a torch without it is noticed here."""
    of_torch = pytest.importorskip("torch._C._distributed_c10d")._SymmetricMemory
    for name, keywords in (
        ("empty_strided_p2p", "size: stride: dtype: device: group_name:"),
        ("rendezvous", "tensor:"),
        ("get_buffer", "rank: sizes: dtype: storage_offset:"),
        ("barrier", "channel: timeout_ms:"),
    ):
        said = getattr(of_torch, name).__doc__
        places = [said.find(keyword) for keyword in keywords.split()]
        assert places == sorted(places) and places[0] > 0, said


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
