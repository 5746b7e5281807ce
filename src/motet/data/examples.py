"""What training asks of its examples, whether they are read (`dataset.py`) or drawn (`drawn.py`)."""

from __future__ import annotations

from typing import Protocol

from motet.core.arrays import Int32Array, Int64Array
from motet.core.example import TokenSequence
from motet.core.workload import BatchLengths
from motet.data.left_out import LeftOut
from motet.data.media import MediaRef
from motet.data.transforms import Transform


class Examples(Protocol):
    """Examples by number, from 0 to num_examples - 1; the same on all ranks.

    left_out: those that are not trained on. fingerprint: equal only if each number means the same example.
    """

    left_out: LeftOut

    @property
    def num_examples(self) -> int:
        """Examples that can be trained on."""

    @property
    def num_in_manifests(self) -> int:
        """Examples with those that are left out."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def transforms(self) -> dict[str, Transform]:
        """What `Decoder` loads items with, by modality."""

    def batch_lengths(self, example_ids: Int64Array, num_ranks: int) -> BatchLengths:
        """The lengths of a microbatch, without loading anything; each rank is home to an equal share, in order."""

    def item_sizes(self, example_ids: Int64Array) -> dict[str, Int64Array]:
        """Phase -> sizes of its items, int64 [num_items, size_dim], as `batch_lengths` has them."""

    def home(self, example_ids: Int64Array, num_ranks: int) -> Int32Array:
        """The rank of each example if nothing is balanced, int32 [n]."""

    def tokens(self, example_id: int) -> TokenSequence:
        """The tokens of an example; `media` holds names of phases."""

    def media_refs(self, example_id: int) -> list[MediaRef]:
        """The items of an example, in order of appearance."""

    def readers_of(self, ref: MediaRef) -> tuple[str, ...]:
        """The names of the phases that compute an item."""

    def is_added(self, phase: str) -> bool:
        """Whether the rows of a phase are added to those of the first phase that reads the same items."""

    def where(self, example_id: int) -> str:
        """The example, for messages."""
