"""Items that are too long for a rank cut over several, beside whole ones: placed, and priced as they are executed.

The items of an encoder follow their sequences, or are balanced by themselves, whole or cut, whichever is faster. In
attention, a rank gets the keys and values that its rows see, in one exchange a layer for all cut items of a phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.balance.backend import Backend
from motet.balance.costs import Packed
from motet.balance.fragments import Overhead, Split, fragment_costs
from motet.balance.item_bytes import ItemBytes, lacking_bytes
from motet.balance.phases import Phase
from motet.balance.scoring import scored
from motet.balance.splitting import split
from motet.core.arrays import Int32Array, Int64Array, rows_of_runs
from motet.core.assignment import Assignment, csr_from_ranks
from motet.core.cuts import rows_of_fragments
from motet.core.exchange import NS_PER_S, Network, moved
from motet.core.words import counted_words

TARGETS = (1.02, 1.1, 1.3)
"""Largest loads, as multiples of the ideal, for which items are cut: more balance takes more cuts and exchange."""
_UNITS_A_RANK = 4
_MOST_ROWS = 64
"""The most rows of a unit in either half of an item: with their mirror images, what a kernel works on at once."""


@dataclass(frozen=True, eq=False)
class CutPhase:
    """The items of a phase of a microbatch, some of them cut.

    placed:    each item on the rank of its largest fragment; loads are those of the fragments.
    fragments: None where nothing is cut.
    keys_ns, keys_bytes: of what ranks that share items exchange for layers; the bytes are those of all ranks.
    """

    placed: Assignment
    fragments: Split | None
    keys_ns: int
    keys_bytes: int


def cut_phase(
    phase: Phase, num_ranks: int, network: Network, room_bytes: int | None = None, backend: Backend = "native"
) -> list[CutPhase]:
    """The items of a phase, which has rows, cut for each of TARGETS. Where ranks share any, none is padded; so of a
    phase with another cost than a packed one there is no way in which nothing is cut.

    room_bytes: what items may take of a rank's memory. Where all of these lack some, items are cut by memory too: as
                few as fit, and for ranks that are as full as each other.
    A fragment takes its share of an item's cost: of all work but that of targets, this holds to within a unit.
    """
    assert phase.rows is not None, "a phase that can be cut"
    phase.cost.weights(phase.lengths)  # It checks that costs fit int64.
    costs, units = phase.cost.alone(phase.lengths), units_of(phase.rows, num_ranks, phase.tile_rows)
    cuts = [split(costs, num_ranks, Overhead(), divisible=units, target=target, backend=backend) for target in TARGETS]
    found = _distinct(cuts, phase, costs, num_ranks, network)
    lacks = [lacking_bytes([(phase.bytes, each.placed, each.fragments)], num_ranks, room_bytes) for each in found]
    if room_bytes is not None and phase.bytes is not None and all(lacks):
        cuts += _cut_by_memory(phase.bytes, costs, units, num_ranks, room_bytes, backend)
        found = _distinct(cuts, phase, costs, num_ranks, network)
    return [each for each in found if each.fragments is not None or isinstance(phase.cost, Packed)]


def _distinct(
    cuts: Sequence[Split], phase: Phase, costs: Int64Array, num_ranks: int, network: Network
) -> list[CutPhase]:
    """Ways to cut a phase with what they exchange, without those that are as the one before."""
    found: list[CutPhase] = []
    for cut, before in zip(cuts, (None, *cuts), strict=False):
        if before is not None and _same(cut, before):
            continue
        keys_s, keys_bytes = _keys(cut, phase, num_ranks, network) if cut.num_cut else (0.0, 0)
        placed = _placed(cut, costs, num_ranks)
        found.append(CutPhase(placed, cut if cut.num_cut else None, round(keys_s * NS_PER_S), keys_bytes))
    return found


def units_of(rows: Int64Array, num_ranks: int, tile_rows: int = 0) -> Int64Array:
    """The units between which items of so many rows can be cut, int64 [num_items], >= 1. tile_rows: as of `Phase`."""
    if tile_rows:
        return np.maximum(rows // tile_rows, 1)
    half = -(-rows // 2)
    units: Int64Array = np.maximum(half // np.clip(half // (_UNITS_A_RANK * num_ranks), 1, _MOST_ROWS), 1)
    return units


def largest_fragments(cut: Split) -> Int32Array:
    """The rank of the largest fragment of each item, the first of several, int32 [num_items]."""
    by_size = np.lexsort((cut.part, -(cut.end - cut.begin), cut.item))
    return cut.assignment.ranks[by_size[np.searchsorted(cut.item, np.arange(len(cut.units)))]]


def deliveries(
    phase: Phase, placed: Assignment, cut: Split | None, backbone: Assignment, fragments: Split | None
) -> tuple[Int32Array, Int32Array, Int64Array]:
    """Where outputs of an encoder's items go: (from rank, to rank, bytes), an entry for each pair that shares an item.

    placed, cut: of the items. backbone, fragments: of their sequences.
    Where an item stands in its sequence is not known from lengths: rows are taken to be all over it.
    """
    assert phase.output_bytes is not None
    ranks, owner, size = placed.ranks, phase.owner, phase.output_bytes
    if cut is not None:
        ranks, owner, size = (
            cut.assignment.ranks,
            owner[cut.item],
            _shares(cut, size[cut.item], np.arange(len(cut.item))),
        )
    if fragments is None:
        return ranks, backbone.ranks[owner], size
    first, last = (np.searchsorted(fragments.item, owner, side=side) for side in ("left", "right"))
    counts = last - first
    part = rows_of_runs(first, counts)
    return np.repeat(ranks, counts), fragments.assignment.ranks[part], _shares(fragments, np.repeat(size, counts), part)


def _shares(cut: Split, amounts: Int64Array, part: Int64Array) -> Int64Array:
    """What fragments have of amounts of their whole items. part: which fragments, int64 [n]. amounts: int64 [n]."""
    units = cut.units[cut.item[part]]
    shares: Int64Array = amounts * cut.end[part] // units - amounts * cut.begin[part] // units
    return shares


def cut_words(fragments: Split | None, rows: Int64Array | None, what: str = "sequence") -> str:
    """What is cut, in words: "1 sequence cut (3,212 rows over 4 ranks)"; "" for nothing. rows: of each item."""
    if fragments is None or rows is None:
        return ""
    examples, degrees = np.unique(fragments.item, return_counts=True)
    is_cut = degrees > 1
    longest_first = np.argsort(-rows[examples[is_cut]], kind="stable")
    cut, over = rows[examples[is_cut]][longest_first].tolist(), degrees[is_cut][longest_first].tolist()
    named = [f"{length:,} rows over {degree} ranks" for length, degree in zip(cut, over, strict=True)]
    more = f"; {len(named) - 3} more" if len(named) > 3 else ""
    return f"{counted_words(len(named), what)} cut ({', '.join(named[:3])}{more})"


def _cut_by_memory(
    items: ItemBytes, costs: Int64Array, units: Int64Array, num_ranks: int, room_bytes: int, backend: Backend
) -> list[Split]:
    """Items cut and placed by what they take of memory: for ranks that have room for it, and for the fullest least."""
    needed, overhead = items.alone, Overhead(fraction=items.copied_share)
    fits = float(room_bytes * num_ranks / max(int(needed.sum()), 1))
    splits = [
        split(needed, num_ranks, overhead, divisible=units, target=min(max(target, 1.0), 1000.0), backend=backend)
        for target in (fits, TARGETS[0])
    ]
    none = np.zeros((len(costs), 1), dtype=np.int64)
    works = [fragment_costs(costs[:, None], none, cut.units, cut.item, cut.begin, cut.end)[:, 0] for cut in splits]
    return [
        replace(cut, costs=work, assignment=scored(cut.assignment.ranks, work, num_ranks))
        for cut, work in zip(splits, works, strict=True)
    ]


def _same(one: Split, other: Split) -> bool:
    return np.array_equal(one.assignment.ranks, other.assignment.ranks) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("item", "begin", "end")
    )


def _placed(cut: Split, costs: Int64Array, num_ranks: int) -> Assignment:
    """Each item on the rank of its largest fragment, the first of several; loads are of fragments."""
    ranks = largest_fragments(cut)
    return Assignment(ranks, *csr_from_ranks(ranks, num_ranks), cut.assignment.loads, -(-int(costs.sum()) // num_ranks))


def _keys(cut: Split, phase: Phase, num_ranks: int, network: Network) -> tuple[float, int]:
    """Seconds and bytes of exchanging keys and values for these fragments, and what is beside or merged."""
    assert phase.rows is not None
    is_causal = phase.output_bytes is None  # The backbone's sequences; rows of an encoder's item see all of it.
    lengths = phase.rows if phase.key_lengths is None else phase.key_lengths
    seen: dict[tuple[int, int], tuple[Int32Array, Int32Array, Int64Array, Int64Array]] = {}
    node, seconds, size_bytes = network.nodes(num_ranks), 0.0, 0
    for layer in phase.keys:
        if (of_rows := (layer.divisor, layer.queries)) not in seen:
            seen[of_rows] = _seen_rows(cut, layer.rows(lengths), is_causal=is_causal)
        source, sink, amount, needed = seen[of_rows]
        # A window is as long before each of a fragment's two runs of rows.
        share = np.minimum(1.0, 2.0 * (layer.window - 1) / np.maximum(needed, 1)) if layer.window else 1.0
        moving = np.rint(amount * share).astype(np.int64) * layer.row_bytes
        seconds += layer.count * float(network.exchange_s(moved(source, sink, moving, node))[0])
        size_bytes += layer.count * int(moving.sum())
    if phase.beside is not None and phase.beside.any():
        further = np.flatnonzero(cut.part > 0)  # The first fragments have what is beside, or about.
        first = np.zeros(len(phase.beside), dtype=np.int32)
        first[cut.item[cut.part == 0]] = cut.assignment.ranks[cut.part == 0]
        item, sink = cut.item[further], cut.assignment.ranks[further]
        seconds += 2 * float(network.exchange_s(moved(first[item], sink, phase.beside[item], node))[0])
        size_bytes += 2 * int(phase.beside[item].sum())
    if phase.merged:
        merging, sink, whole = largest_fragments(cut)[cut.item], cut.assignment.ranks, phase.rows[cut.item]
        own = rows_of_fragments(whole, cut.begin, cut.end, cut.units[cut.item]) * (merging != sink)
        for of_sequences, times in phase.merged:
            given = of_sequences[cut.item] * own // np.maximum(whole, 1)
            seconds += times * float(network.exchange_s(moved(merging, sink, given, node))[0])
            size_bytes += times * int(given.sum())
    return seconds, size_bytes


def _seen_rows(
    cut: Split, rows: Int64Array, *, is_causal: bool
) -> tuple[Int32Array, Int32Array, Int64Array, Int64Array]:
    """Rows that fragments see of others of their item: (from rank, to rank, rows, what the latter sees of all).

    is_causal: all rows in the front half are seen; of those in the back half, those of the fragments behind, as they
    stand before. Else all are seen.
    """
    shared = np.flatnonzero(cut.num_parts > 1)
    item, part = cut.item[shared], cut.part[shared]
    run = -(-rows[item] // 2) if is_causal else rows[item]
    size = run * cut.end[shared] // cut.units[item] - run * cut.begin[shared] // cut.units[item]
    one, other = np.nonzero((item[:, None] == item) & (part[:, None] != part))  # `one` sees rows of `other`
    amount = size[other] * np.where(is_causal & (part[other] > part[one]), 2, 1)
    needed = np.bincount(one, amount, len(shared)).astype(np.int64)
    ranks = cut.assignment.ranks[shared]
    return ranks[other], ranks[one], amount, needed[one]
