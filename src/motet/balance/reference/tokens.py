"""The number of (query, key) pairs that each block of a sequence attends to, from the table of segments alone.

Cornstarch sums the rows of the attention mask (section 4.3.2), which has tokens x tokens entries. Here is no mask.
All tokens of a segment attend to the same earlier segments, so its j-th token has `first + slope * j` pairs:

1. Walk over the segments. Count the tokens so far of each modality in the document, and of each instance.
2. A token attends to the tokens so far whose modality is in `attends_to`.
3. With an instance, a token also attends to all tokens of the instance that step 2 has not counted: slope 0.
   Without an instance, it attends to itself, and, if its modality is in `attends_to`, to the tokens before it in the
   segment: slope 1.
4. A block sums up its pieces of segments; each piece is an arithmetic series.

motet.balance.segments defines what a token attends to.
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
            index = (start + done) // block
            end = min(tokens, (index + 1) * block - start)
            pairs[index] += (end - done) * first + slope * (end - done) * (done + end - 1) // 2
            done = end
        start += tokens
    return np.array(pairs, dtype=np.int64)


def _series(*columns: Int64Array) -> list[tuple[int, int]]:
    """(first, slope) of each segment: the pairs of its first token, and how many more each next token has."""
    length, _, _, instance, _ = columns
    in_all = np.zeros(len(length) + 1, dtype=np.int64)  # tokens of each instance
    np.add.at(in_all, instance, length)
    series = []
    current_doc = -1
    seen: dict[int, int] = {}  # per modality, tokens of the document so far
    seen_of_instance = [0] * (len(length) + 1)
    for tokens, doc, mod, inst, bits in zip(*(column.tolist() for column in columns), strict=True):
        if doc != current_doc:
            current_doc, seen = doc, {}
        before = sum(count for other, count in seen.items() if bits >> other & 1)
        attends_to_own = bits >> mod & 1
        if inst:
            series.append((before + int(in_all[inst]) - attends_to_own * seen_of_instance[inst], 0))
        else:
            series.append((before + 1, attends_to_own))
        seen[mod] = seen.get(mod, 0) + tokens
        seen_of_instance[inst] += tokens
    return series
