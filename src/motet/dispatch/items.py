"""Exchange mode: lengths are known only after loading, so lengths are gathered and items sent (OrchMLLM section 5.2.1).

1. Each rank loads its examples.
2. One all-gather gives the lengths of all loaded examples to every rank.
3. All ranks compute the same decision.
4. One all-to-all of bytes sends tokens to the rank that runs their sequence, and media to the rank that encodes them.

Contents that a rank keeps are not copied. Everything works on numpy arrays and on a host (gloo) group, so it can run in
a prefetch thread, apart from the devices' collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from motet.assign.orchestrator import Decision, Orchestrator
from motet.core.arrays import BoolArray, Int64Array, UInt8Array
from motet.core.example import Media, TokenSequence
from motet.core.workload import BatchLengths
from motet.dispatch.loaded import LoadedExample, LoadedTables, Measure, Parcels, tables_of
from motet.dispatch.message import read_example, read_media, write_example, write_media


@dataclass(frozen=True, eq=False)
class ExchangedItems:
    """What one rank holds after the exchange, as `assemble` takes it, and what all ranks know of the microbatch.

    sequences, media: those that this rank computes, in the order of their positions on the rank.
    kept: bool [num_examples of all ranks, by rank], False for an example that its rank could not load; `lengths` and
          `decision` are of the others.
    moved_bytes: bytes sent from rank to rank, summed over all ranks. crossing_bytes: those sent from node to node.

    Example: with `exchanged = ItemExchange(group, orchestrator, measures)(examples)`, the rank's batch is
    `assemble(exchanged.decision, exchanged.lengths, rank, exchanged.sequences, exchanged.media)`.
    """

    sequences: list[TokenSequence]
    media: dict[str, list[Media]]
    lengths: BatchLengths
    decision: Decision
    kept: BoolArray
    moved_bytes: int
    crossing_bytes: int


class ItemExchange:
    """Sends loaded examples to the ranks that compute them.

    group:    a host process group (gloo) whose ranks are those of the orchestrator.
    measures: per encoder phase, lengths from the sizes of items; a ModalityModule is a Measure.
    capacity: int64 words that a rank's lengths may take in the all-gather. If the lengths of any rank do not fit, all
              ranks grow it alike and gather once more.

    Example, on every rank of a process group:
        exchange = ItemExchange(host_group, orchestrator, {"image": image_module})
        items = exchange(examples_of_this_rank)  # items.sequences and items.media are what this rank computes
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        orchestrator: Orchestrator,
        measures: Mapping[str, Measure],
        *,
        capacity: int = 1024,
        ranks_per_node: int | None = None,
    ) -> None:
        if dist.get_world_size(group) != orchestrator.num_ranks:
            raise ValueError(f"the group has {dist.get_world_size(group)} ranks, not {orchestrator.num_ranks}")
        if measures.keys() != set(orchestrator.encoders):
            raise ValueError(f"measures are given for {sorted(measures)}, the phases are {orchestrator.encoders}")
        self.group = group
        self.rank = dist.get_rank(group)
        self.orchestrator = orchestrator
        self.measures = measures
        self.capacity = max(capacity, 1)
        self.ranks_per_node = ranks_per_node or orchestrator.num_ranks

    def __call__(self, examples: Sequence[LoadedExample | None]) -> ExchangedItems:
        """A collective: every rank calls it with its own examples, None for one that could not be loaded."""
        phases = self.orchestrator.encoders
        tables = LoadedTables.read(self._gather(tables_of(examples, phases, self.measures)), phases)
        decision = self.orchestrator.decide(tables.lengths, tables.input_bytes)
        parcels = tables.parcels(decision)
        contents = self._loaded(examples, tables, parcels)
        self._deliver(parcels, tables, contents)
        mine = np.flatnonzero(parcels.destination == self.rank)
        by_kind = [[contents[parcel] for parcel in mine[parcels.kind[mine] == kind]] for kind in range(1 + len(phases))]
        moved = parcels.source != parcels.destination
        crosses = parcels.source // self.ranks_per_node != parcels.destination // self.ranks_per_node
        return ExchangedItems(
            sequences=by_kind[0],
            media=dict(zip(phases, by_kind[1:], strict=True)),
            lengths=tables.lengths,
            decision=decision,
            kept=tables.kept,
            moved_bytes=int(parcels.size_bytes[moved].sum()),
            crossing_bytes=int(parcels.size_bytes[crosses].sum()),
        )

    def _gather(self, words: Int64Array) -> list[Int64Array]:
        """The words of every rank. Each rank sends their number first, so all ranks see whether any was cut off."""
        while True:
            sent = torch.zeros(1 + self.capacity, dtype=torch.int64)
            fitting = min(len(words), self.capacity)
            sent[0] = len(words)
            sent[1 : 1 + fitting] = torch.from_numpy(words[:fitting])
            received = torch.empty(self.orchestrator.num_ranks * len(sent), dtype=torch.int64)
            dist.all_gather_single(received, sent, group=self.group)
            rows = received.numpy().reshape(-1, len(sent))
            longest = int(rows[:, 0].max())
            if longest <= self.capacity:
                return [row[1 : 1 + row[0]] for row in rows]
            self.capacity = 1 << (longest - 1).bit_length()

    def _loaded(
        self, examples: Sequence[LoadedExample | None], tables: LoadedTables, parcels: Parcels
    ) -> dict[int, TokenSequence | Media]:
        """Parcel -> content, for all parcels that this rank has loaded."""
        items = [item for example in examples if example is not None for item in example.media]
        first_example = np.searchsorted(tables.example_rank, self.rank)
        first_item = np.searchsorted(tables.item_rank, self.rank)
        contents: dict[int, TokenSequence | Media] = {}
        for parcel in np.flatnonzero(parcels.source == self.rank):
            row = parcels.row[parcel]
            if parcels.kind[parcel] == 0:
                contents[parcel] = examples[row - first_example].sequence
            else:
                contents[parcel] = items[row - first_item]
        return contents

    def _deliver(self, parcels: Parcels, tables: LoadedTables, contents: dict[int, TokenSequence | Media]) -> None:
        """Send what other ranks compute, and add what this rank receives to `contents`.

        No rank calls a collective if no parcel moves.
        """
        if (parcels.source == parcels.destination).all():
            return
        num_ranks = self.orchestrator.num_ranks
        sent, received = parcels.sent_by(self.rank), parcels.received_by(self.rank)
        outgoing = np.zeros(parcels.size_bytes[sent].sum(), dtype=np.uint8)
        for parcel, part in _parts(outgoing, sent, parcels):
            content = contents[parcel]
            if isinstance(content, Media):
                write_media(content, part)
            else:
                write_example(content, part)
        incoming = np.empty(parcels.size_bytes[received].sum(), dtype=np.uint8)
        dist.all_to_all_single(
            torch.from_numpy(incoming),
            torch.from_numpy(outgoing),
            parcels.bytes_by_rank(received, parcels.source, num_ranks),
            parcels.bytes_by_rank(sent, parcels.destination, num_ranks),
            group=self.group,
        )
        for parcel, part in _parts(incoming, received, parcels):
            row = int(parcels.row[parcel])
            if parcels.kind[parcel] == 0:
                contents[parcel] = read_example(part, tables.num_text_tokens(row), tables.media_of(row))
            else:
                contents[parcel] = read_media(part, tables.media_shape(row))


def _parts(buffer: UInt8Array, order: Int64Array, parcels: Parcels) -> Iterator[tuple[int, UInt8Array]]:
    """Each parcel of a buffer with its bytes. order: the parcels in the order of their bytes."""
    ends = np.cumsum(parcels.size_bytes[order])
    for parcel, start, end in zip(order, ends - parcels.size_bytes[order], ends, strict=True):
        yield parcel, buffer[start:end]
