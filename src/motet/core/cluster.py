"""The hardware of a job: devices, ranks of a node, nodes, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import ArgumentError
from motet.core.limited import Bytes, BytesPerSecond, NumRanks, OperationsPerSecond, Seconds
from motet.core.limits import MAX_NODES, MAX_PIECES, MAX_RANKS
from motet.core.words import counted_words

TensorTransport = Literal["collectives", "copy_engines"]
"""How pieces of products travel between tensor-parallel ranks."""


def check_pieces(tensor_pieces: int, tensor_transport: TensorTransport) -> None:
    """Raise ArgumentError for pieces that are to travel by copies where there are none."""
    if tensor_transport != "collectives" and tensor_pieces == 1:
        raise ArgumentError(
            f"tensor_transport is {tensor_transport!r}, by which pieces of products travel, and tensor_pieces is 1, "
            "which cuts none; set tensor_pieces to 2 or more, or leave tensor_transport out."
        )


@dataclass(frozen=True)
class Link:
    """The speed of messages between ranks.

    bytes_per_s: bytes a second that a rank sends; it receives as many at the same time.
    latency_s:   seconds of a message without its bytes.

    Example:
        >>> Link(bytes_per_s=40e9, latency_s=50e-6).seconds(np.array([0, 4_000_000])).round(6).tolist()
        [0.0, 0.00015]
    """

    bytes_per_s: BytesPerSecond
    latency_s: Seconds

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ArgumentError(f"bytes_per_s is {self.bytes_per_s}; it must be above 0.")
        if not 0 <= self.latency_s < math.inf:
            raise ArgumentError(f"latency_s is {self.latency_s}; it must be finite and at least 0.")

    def seconds(self, size_bytes: Float64Array) -> Float64Array:
        """Seconds of messages, of any shape; 0 s for 0 bytes."""
        return np.where(size_bytes > 0, self.latency_s + size_bytes / self.bytes_per_s, 0.0)

    def no_faster_than(self, other: Link) -> Link:
        """The lower bandwidth and the longer latency of the two."""
        return Link(min(self.bytes_per_s, other.bytes_per_s), max(self.latency_s, other.latency_s))


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU rank.

    peak_flops:         dense operations a second by precision ("bf16", "fp16", "fp8", "tf32", "fp32", "fp64").
    memory_bytes:       size of its memory.
    memory_bytes_per_s: bandwidth of its memory.
    overlaps:           whether it computes while collectives run. A CPU rank waits for them; what it sends to another
                        rank leaves by itself.
    """

    name: str
    peak_flops: Mapping[str, OperationsPerSecond]
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    overlaps: bool = True

    def __post_init__(self) -> None:
        peaks = {f"peak_flops.{precision}": peak for precision, peak in self.peak_flops.items()}
        sizes = {"memory_bytes": self.memory_bytes, "memory_bytes_per_s": self.memory_bytes_per_s}
        for name, number in (peaks | sizes).items():
            if not number > 0:
                raise ArgumentError(f"{name} of device {self.name!r} is {number}; it must be above 0.")


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` nodes of `ranks_per_node` ranks, one device a rank. Rank r is in node r // ranks_per_node.

    tensor_pieces: tensor parallelism cuts a product and its messages into so many pieces, and sends one while it
                   computes another (StepCCL, MMScale section 6); 1 is nothing hidden. Training does so too.
    tensor_transport: how training sends pieces: by collectives, or by copies between the GPUs of a node, which their
                   copy engines make. Both are priced alike.

    Example:
        >>> device = Device("gpu", {"bf16": 1e15}, memory_bytes=80 * 10**9, memory_bytes_per_s=3e12)
        >>> cluster = Cluster(device, 2, 8, intra_node=Link(450e9, 3e-6), inter_node=Link(50e9, 14e-6))
        >>> cluster.num_ranks, cluster.node_of(9), cluster.link([7, 8]).bytes_per_s
        (16, 1, 50000000000.0)
    """

    device: Device
    num_nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    ranks_per_node: NumRanks
    intra_node: Link
    inter_node: Link
    tensor_pieces: Annotated[int, Field(ge=1, le=MAX_PIECES)] = 1
    tensor_transport: TensorTransport = "collectives"

    def __post_init__(self) -> None:
        if self.tensor_pieces > 1 and not self.device.overlaps:
            raise ArgumentError(
                f"tensor_pieces is {self.tensor_pieces}, but ranks on {self.device.name!r} compute nothing while "
                "collectives run, so that pieces would gain nothing; leave it out."
            )
        check_pieces(self.tensor_pieces, self.tensor_transport)
        if self.num_ranks > MAX_RANKS:
            raise ArgumentError(
                f"{counted_words(self.num_nodes, 'node')} of {counted_words(self.ranks_per_node, 'rank')} are "
                f"{counted_words(self.num_ranks, 'rank')}; there may be {MAX_RANKS:,}."
            )

    @property
    def runs_beside_sums(self) -> bool:
        """Whether other work can run beside the sums of tensor-parallel ranks: not where pieces are in their place."""
        return self.device.overlaps and self.tensor_pieces == 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node that a rank is in."""
        return rank // self.ranks_per_node

    def nodes_of(self, ranks: range) -> Int64Array:
        """The node that each of a run of ranks is in, int64 [num_ranks]."""
        nodes: Int64Array = np.arange(ranks.start, ranks.stop, ranks.step) // self.ranks_per_node
        return nodes

    def unlike(self, ranks: range, size: int, *, apart: int = 1) -> list[range]:
        """The first of each kind of group that a run of ranks consists of: all others lie on nodes as one of these
        does, so that messages take as long.

        A group has `size` ranks, which are `apart` from one to the next. O(ranks_per_node * size), however many groups
        there are.

        Example: pairs of ranks, of which the third is on two nodes of five.
            >>> device = Device("gpu", {"bf16": 1e15}, memory_bytes=80 * 10**9, memory_bytes_per_s=3e12)
            >>> cluster = Cluster(device, 2, 5, intra_node=Link(450e9, 3e-6), inter_node=Link(50e9, 14e-6))
            >>> cluster.unlike(range(10), 2), cluster.unlike(range(10), 2, apart=5)
            ([range(0, 2), range(4, 6)], [range(0, 10, 5)])
        """
        block, per_node = size * apart, self.ranks_per_node
        if self.num_nodes == 1 or size == 1:
            return [range(ranks.start, ranks.start + block, apart)]
        begins = ranks.start + block * np.arange(min(len(ranks) // block, per_node))
        firsts = np.add.outer(begins, np.arange(min(apart, per_node))).ravel().tolist()
        # Groups whose first ranks stand alike on their nodes lie alike.
        distinct: dict[int, int] = {}
        for first in firsts:
            distinct.setdefault(first % per_node, first)
        kinds: dict[bytes, range] = {}
        for first in distinct.values():
            leaves_node = np.diff(np.arange(first, first + block, apart) // per_node) > 0
            kinds.setdefault(leaves_node.tobytes(), range(first, first + block, apart))
        return list(kinds.values())

    def link(self, ranks: Iterable[int]) -> Link:
        """The slowest link between these ranks."""
        return self.intra_node if len({self.node_of(rank) for rank in ranks}) <= 1 else self.inter_node
