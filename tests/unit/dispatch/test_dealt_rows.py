"""Rows of sequences that ranks share are dealt out by what they see, as the sequences that a rank is given tell."""

from dataclasses import replace

import numpy as np
import pytest

from motet.balance import Packed
from motet.core.attention_table import AttentionTable
from motet.core.cuts import ItemCuts
from motet.core.example import TokenSequence
from motet.core.sight import CAUSAL, Sight
from motet.core.workload import BatchLengths, ItemLengths
from motet.dispatch import Orchestrator
from motet.dispatch.batch import pack
from motet.dispatch.context import ContextPlace
from motet.dispatch.cut_batch import shared_out
from motet.dispatch.stage_batch import assemble_stages

NUM_RANKS, ROWS, TEXT = 4, [3000, 600], [400, 900, 1100]
IMAGES, AHEAD = Sight(("image",)), Sight(("image",), prefix=True)


def examples():
    """Three sequences, the first two of which have an image, and their lengths."""
    sequences = []
    for text, at in zip(TEXT, ((200,), (200,), ())):
        num_tokens = text + len(at)
        sequences.append(
            TokenSequence(
                np.arange(num_tokens) % 50,
                np.arange(num_tokens) > num_tokens // 2,
                ("image",) * len(at),
                np.array(at, int),
            )
        )
    images = ItemLengths(np.array([0, 1]), 4 * np.array(ROWS), np.array(ROWS))
    lengths = np.array([text + rows for text, rows in zip(TEXT, [*ROWS, 0])], dtype=np.int64)
    targets = np.array([int(sequence.targets.sum()) for sequence in sequences])
    return sequences, BatchLengths(lengths, targets, np.zeros(3, np.int32), {"image": images})


def unevenness(packed, sight):
    """Pairs of the busiest rank over the mean. packed: what each rank runs."""
    shares = [each.context for each in packed]
    whole = shares[0].whole
    offsets = whole.offsets.numpy().astype(np.int64)
    places = {"image": whole.feature_positions["image"].numpy()}
    together = sight.together(offsets, whole.targets.numpy(), places)
    pairs = AttentionTable.packed(np.diff(offsets), together=together).pairs
    loads = np.array([pairs[share.own].sum() for share in shares])
    assert sum(len(share.own) for share in shares) == len(pairs) and loads.sum() == pairs.sum()
    return loads.max() / loads.mean()


@pytest.mark.parametrize("sight", [IMAGES, AHEAD])
def test_context_parallel_ranks_have_equally_many_pairs(sight):
    sequences, lengths = examples()
    decision = Orchestrator({"backbone": Packed(), "image": Packed()}, 1, ()).decide(lengths)

    def packed_by(dealt):
        none = frozenset[str]()
        places = [ContextPlace(c, NUM_RANKS, none, none, none, {}, sight=dealt) for c in range(NUM_RANKS)]
        return [
            assemble_stages(decision, lengths, {"backbone": 0}, sequences, {}, {}, place).sequences for place in places
        ]

    assert unevenness(packed_by(sight), sight) < 1.01 < unevenness(packed_by(CAUSAL), sight)


@pytest.mark.parametrize("sight", [IMAGES, AHEAD])
def test_fragments_of_cut_sequences_have_equally_many_pairs(sight):
    sequences, lengths = examples()
    decision = Orchestrator({"backbone": Packed(), "image": Packed()}, NUM_RANKS, ()).decide(lengths)
    part, item = np.tile(np.arange(NUM_RANKS), 3), np.repeat(np.arange(3), NUM_RANKS)
    cuts = ItemCuts(item, part.astype(np.int32), part * 20, (part + 1) * 20, np.full(len(part), 80))
    packed = pack(sequences, {"image": np.array(ROWS)})

    def packed_by(dealt):
        of = replace(decision, cuts=cuts, sight=dealt)
        return [shared_out(packed, of, rank, lengths) for rank in range(NUM_RANKS)]

    assert unevenness(packed_by(sight), sight) < 1.01 < unevenness(packed_by(CAUSAL), sight)
