"""How long things are, a column a module, and nothing else about them: what balancing is decided from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

BACKBONE = "backbone"
"""The name of the phase that runs the LLM on whole interleaved sequences; every other phase is an encoder's."""


@dataclass(frozen=True, eq=False)
class ItemLengths:
    """The items (images, clips) of one modality in a batch, ordered by example, then by place in the example.

    example:    int64 [num_items], position in the batch of the example that the item belongs to; ascending.
    length:     int64 [num_items], what the encoder computes on: patches, mel frames.
    num_tokens: int64 [num_items], rows that the item takes in the backbone's sequence.
    """

    example: NDArray[np.int64]
    length: NDArray[np.int64]
    num_tokens: NDArray[np.int64]

    @property
    def num_items(self) -> int:
        return len(self.example)


@dataclass(frozen=True, eq=False)
class BatchLengths:
    """The lengths of one microbatch over all ranks: all that a balancer needs to know of it.

    sequence:    int64 [num_examples], tokens of the whole interleaved sequence, media included (OrchMLLM section 6).
    num_targets: int64 [num_examples], tokens on which loss is taken.
    home:        int32 [num_examples], the rank that computes the example when nothing is balanced.
    items:       per encoder phase, the items of all examples.
    """

    sequence: NDArray[np.int64]
    num_targets: NDArray[np.int64]
    home: NDArray[np.int32]
    items: dict[str, ItemLengths]

    @property
    def num_examples(self) -> int:
        return len(self.sequence)

    def keep(self, kept: NDArray[np.bool_]) -> BatchLengths:
        """The batch without the examples where `kept`, bool [num_examples], is False; examples are renumbered."""
        renumbered = np.cumsum(kept) - 1
        items = {}
        for name, column in self.items.items():
            stays = kept[column.example]
            items[name] = ItemLengths(
                example=renumbered[column.example[stays]],
                length=column.length[stays],
                num_tokens=column.num_tokens[stays],
            )
        return replace(
            self, sequence=self.sequence[kept], num_targets=self.num_targets[kept], home=self.home[kept], items=items
        )


def home_ranks(num_examples: int, num_ranks: int) -> NDArray[np.int32]:
    """Where the examples of a batch are computed when nothing is balanced: consecutive, equal counts to within one."""
    return (np.arange(num_examples) * num_ranks // max(num_examples, 1)).astype(np.int32)
