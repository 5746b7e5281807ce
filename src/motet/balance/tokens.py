"""Context parallelism: which rank computes which block of a sequence's tokens.

Cornstarch (section 4.3.2): tokens are dealt in blocks by the attention work of each, not by their number, since in a
multimodal sequence the one does not follow from the other. Its Algorithm 2 is LPT (corrected: it walks the sorted list,
and pushes the new load back for the same rank); swaps follow here, as for whole items. The layouts that it is compared
with are here, too. For all-gather context parallelism: a block's work is that of its queries, wherever the keys are.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_num_ranks
from motet.balance.placement import assign, score
from motet.balance.segments import MAX_TOKENS, Segments
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError

TokenMethod = Literal["lpt", "zigzag", "ring", "random"]

TIME_BUDGET_S = 0.0005
"""Of swaps, so that a million tokens take about a millisecond in all; more gains parts in ten thousand."""


def distribute_tokens(
    segments: Segments,
    num_ranks: int,
    block: int = 128,
    method: TokenMethod = "lpt",
    *,
    equal_counts: bool = False,
    seed: int = 0,
    backend: Backend = "native",
) -> Assignment:
    """Place the blocks of a sequence, `block` consecutive tokens each (the last may be shorter), on ranks.

    method: "lpt":    balance the attended (query, key) pairs, nearly always to a part in a thousand;
            "zigzag": rank r gets chunks r and 2 num_ranks - 1 - r of 2 num_ranks: right for one causal document;
            "ring":   rank r gets the r-th of num_ranks chunks;
            "random": as many blocks for each rank, drawn by `seed`.
    equal_counts: with "lpt", the numbers of blocks of two ranks differ by at most one, for the sake of memory and of
           work besides attention.
    block: what the attention kernel works on at once. Where one block is more work than the mean rank (long text in
           few tokens: imbalance[0] is 1 and no better is possible), a smaller one helps.
    The Assignment's items are blocks; loads are int64 [num_ranks, 2]: attended pairs, exactly, and tokens; so are bound
    [2] and imbalance [2].
    Raises ArgumentError for num_ranks < 1, block outside 1 .. 2^31 - 1, seed outside 0 .. 2^64 - 1, an unknown method,
    and equal_counts with another method than "lpt".
    O(num_segments + num_blocks log num_blocks), no mask is made.
    """
    num_ranks = checked_num_ranks(num_ranks)
    if equal_counts and method != "lpt":
        raise ArgumentError(f"equal_counts is given with method {method!r}; it is for 'lpt' alone.")
    for name, value, least, most in (("block", block, 1, MAX_TOKENS), ("seed", seed, 0, 2**64 - 1)):
        if not least <= value <= most:
            raise ArgumentError(f"{name} is {value}; it must be from {least} to {most}.")
    columns = (segments.length, segments.document, segments.modality, segments.instance, segments.attends_to)
    pairs = algorithms(backend).block_pairs(*columns, block)
    if method == "lpt":
        found = assign(pairs, num_ranks, equal_counts=equal_counts, time_budget_s=TIME_BUDGET_S, backend=backend)
    else:
        found = score(_layout(len(pairs), num_ranks, method, seed), pairs, num_ranks)
    return _with_tokens(found, segments.num_tokens, block)


def _layout(num_blocks: int, num_ranks: int, method: TokenMethod, seed: int) -> Int64Array:
    """The rank of each block where only its place counts, int64 [num_blocks]."""
    place = np.arange(num_blocks)
    match method:
        case "ring":
            return place * num_ranks // num_blocks
        case "zigzag":
            chunk = place * 2 * num_ranks // max(num_blocks, 2 * num_ranks)
            return np.minimum(chunk, 2 * num_ranks - 1 - chunk)
        case "random":
            ranks = np.empty(num_blocks, dtype=np.int64)
            ranks[np.argsort(_random_keys(num_blocks, seed), kind="stable")] = place % num_ranks
            return ranks
    raise ArgumentError(f"method is {method!r}; it must be 'lpt', 'zigzag', 'ring' or 'random'.")


def _random_keys(count: int, seed: int) -> NDArray[np.uint16]:
    """The top bits of SplitMix64 (Steele et al. 2014): the same with every version of numpy, and sorted by radix."""
    key = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    key *= np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((key ^ (key >> np.uint64(31))) >> np.uint64(48)).astype(np.uint16)


def _with_tokens(found: Assignment, num_tokens: int, block: int) -> Assignment:
    """With the tokens of each rank as a second column of loads and bound."""
    tokens = found.counts * block
    missing = found.num_items * block - num_tokens  # in the last block
    if missing:
        tokens[found.ranks[-1]] -= missing
    # Some rank has as many whole blocks, and some rank as many blocks, of which at most one is short.
    most_whole = -(-(num_tokens // block) // found.num_ranks) * block
    most = -(-found.num_items // found.num_ranks) * block - missing
    return Assignment(
        found.ranks,
        found.items,
        found.offsets,
        np.stack([found.loads, tokens], axis=1),
        np.array([found.bound, max(most_whole, most, 0)], dtype=np.int64),
    )
