"""How many (query, key) pairs each block of a sequence attends to, from the table of segments alone.

Cornstarch sums the rows of the attention mask (section 4.3.2): tokens x tokens. Here no mask is ever made. Within a
segment all tokens attend to the same earlier segments, so the pairs of its j-th token are `first + slope * j`:

1. Walk the segments, and count the tokens seen so far of each modality in the document, and of each instance.
2. Of what comes before the segment, its tokens attend to the counted ones of the modalities in `attends_to`.
3. Tokens of an instance attend to all of it, and what of it came before is not counted twice: slope 0. Without an
   instance, a token attends to itself, and if its own modality is in `attends_to`, to those before it in the segment:
   slope 1.
4. A block adds up the pieces of segments within it, each an arithmetic series.

What a token attends to is defined in motet.balance.segments.
"""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Int64Array


def block_pairs(
    length: Int64Array,
    document: Int64Array,
    modality: Int64Array,
    instance: Int64Array,
    attends_to: Int64Array,
    block: int,
) -> Int64Array:
    """The pairs of each block of `block` consecutive tokens (the last may be shorter), int64 [num_blocks].

    The columns, each [num_segments], are those of Segments. O(num_segments * modalities of a document + num_blocks).
    """
    num_blocks = -(-int(length.sum()) // block)
    pairs = [0] * num_blocks
    start = 0  # the segment's first token
    for tokens, (first, slope) in zip(
        length.tolist(), _series(length, document, modality, instance, attends_to), strict=True
    ):
        done = 0
        while done < tokens:
            place = (start + done) // block
            end = min(tokens, (place + 1) * block - start)
            pairs[place] += (end - done) * first + slope * (end - done) * (done + end - 1) // 2
            done = end
        start += tokens
    return np.array(pairs, dtype=np.int64)


def _series(*columns: Int64Array) -> list[tuple[int, int]]:
    """Of each segment: the pairs of its first token, and by how many each next token has more."""
    length, _, _, instance, _ = columns
    in_all = np.zeros(len(length) + 1, dtype=np.int64)  # tokens of each instance
    np.add.at(in_all, instance, length)
    series = []
    current = -1
    seen: dict[int, int] = {}  # per modality, tokens of the document so far
    seen_of_instance = [0] * (len(length) + 1)
    for tokens, doc, mod, inst, bits in zip(*(column.tolist() for column in columns), strict=True):
        if doc != current:
            current, seen = doc, {}
        before = sum(count for other, count in seen.items() if bits >> other & 1)
        sees_own = bits >> mod & 1
        if inst:
            series.append((before + int(in_all[inst]) - sees_own * seen_of_instance[inst], 0))
        else:
            series.append((before + 1, sees_own))
        seen[mod] = seen.get(mod, 0) + tokens
        seen_of_instance[inst] += tokens
    return series
