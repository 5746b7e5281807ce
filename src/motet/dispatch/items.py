"""Exchange mode: lengths are known only after loading, so lengths are gathered and items sent (OrchMLLM section 5.2.1).

1. Each rank loads its examples.
2. One all-gather gives the lengths of all loaded examples to every rank.
3. All ranks compute the same decision.
4. One all-to-all of bytes sends tokens to the rank that runs their sequence, and media to the rank that encodes them.
   With `communicator = "all_gather"` every rank gets all, and takes its part (the paper's strawman).

Contents that a rank keeps are not copied. Everything works on numpy arrays, and on groups apart from those of the
training step (`carrier.py`), so it can run in a prefetch thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from motet.assign.orchestrator import Decision, Orchestrator
from motet.core.arrays import BoolArray, Int64Array, UInt8Array
from motet.core.example import Media, TokenSequence
from motet.core.exchange import Communicator
from motet.core.nodes import node_of_ranks
from motet.core.workload import BatchLengths
from motet.dispatch.carrier import Carrier
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
    carrier:  moves the items' bytes; by default on `group`. Lengths are always gathered on `group`.

    Ranks may have loaded different numbers of examples, or none: each may have a loader of its own.

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
        carrier: Carrier | None = None,
    ) -> None:
        if dist.get_world_size(group) != orchestrator.num_ranks:
            raise ValueError(f"the group has {dist.get_world_size(group)} ranks, not {orchestrator.num_ranks}")
        if measures.keys() != set(orchestrator.encoders):
            raise ValueError(f"measures are given for {sorted(measures)}, the phases are {orchestrator.encoders}")
        self.group = group
        self.rank = dist.get_rank(group)
        self.orchestrator = orchestrator.of_whole_items
        self.measures = measures
        self.capacity = max(capacity, 1)
        self.carrier = carrier or Carrier(group)

    def __call__(self, examples: Sequence[LoadedExample | None]) -> ExchangedItems:
        """A collective: every rank calls it with its own examples, None for one that could not be loaded."""
        phases = self.orchestrator.encoders
        tables = LoadedTables.read(self._gather(tables_of(examples, phases, self.measures)), phases)
        decision = self.orchestrator.decide(tables.lengths, tables.input_bytes)
        parcels = tables.parcels(decision)
        contents = self._loaded(examples, tables, parcels)
        self._deliver(parcels, tables, contents, decision.communicator)
        mine = np.flatnonzero(parcels.destination == self.rank)
        by_kind = [[contents[parcel] for parcel in mine[parcels.kind[mine] == kind]] for kind in range(1 + len(phases))]
        node = node_of_ranks(decision.ranks_per_node, self.orchestrator.num_ranks)
        moved_bytes, crossing_bytes = parcels.sent_bytes(decision.communicator, node)
        return ExchangedItems(
            sequences=by_kind[0],
            media=dict(zip(phases, by_kind[1:], strict=True)),
            lengths=tables.lengths,
            decision=decision,
            kept=tables.kept,
            moved_bytes=moved_bytes,
            crossing_bytes=crossing_bytes,
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

    def _deliver(
        self,
        parcels: Parcels,
        tables: LoadedTables,
        contents: dict[int, TokenSequence | Media],
        communicator: Communicator,
    ) -> None:
        """Send what other ranks compute, and add what this rank receives to `contents`.

        No rank calls a collective if no parcel moves.
        """
        if (parcels.source == parcels.destination).all():
            return
        num_ranks, received = self.orchestrator.num_ranks, parcels.received_by(self.rank)
        if communicator == "all_gather":
            share_bytes, starts = parcels.starts_by_source(num_ranks)
            outgoing, error = self._written(parcels.held_by(self.rank), parcels, contents)
            incoming = self.carrier.all_gather(outgoing, share_bytes)
        else:
            sent = parcels.sent_by(self.rank)
            outgoing, error = self._written(sent, parcels, contents)
            incoming = self.carrier.all_to_all(
                outgoing,
                parcels.bytes_by_rank(received, parcels.source, num_ranks),
                parcels.bytes_by_rank(sent, parcels.destination, num_ranks),
            )
            starts = np.zeros(len(parcels.source), dtype=np.int64)
            starts[received] = np.cumsum(parcels.size_bytes[received]) - parcels.size_bytes[received]
        if error is not None:
            raise error
        for parcel in received:
            part = incoming[starts[parcel] : starts[parcel] + parcels.size_bytes[parcel]]
            row = int(parcels.row[parcel])
            if parcels.kind[parcel] == 0:
                contents[parcel] = read_example(part, tables.num_text_tokens(row), *tables.media_of(row))
            else:
                contents[parcel] = read_media(part, tables.media_shape(row))

    def _written(
        self, sent: Int64Array, parcels: Parcels, contents: Mapping[int, TokenSequence | Media]
    ) -> tuple[UInt8Array, Exception | None]:
        """The bytes of the parcels `sent`, one after the other; and an error, to be raised behind the collective.

        The other ranks wait for these bytes, whatever they are.
        """
        outgoing = self.carrier.buffer(int(parcels.size_bytes[sent].sum()))
        ends = np.cumsum(parcels.size_bytes[sent])
        for parcel, start, end in zip(sent, ends - parcels.size_bytes[sent], ends, strict=True):
            content = contents[parcel]
            try:
                if isinstance(content, Media):
                    write_media(content, outgoing[start:end])
                else:
                    write_example(content, outgoing[start:end])
            except Exception as error:
                return outgoing, error
        return outgoing, None
