"""What training asks of its examples, whether they are read (`dataset.py`) or drawn (`drawn.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from motet.core.arrays import Float64Array, Int32Array, Int64Array
from motet.core.example import TokenSequence
from motet.core.workload import BatchLengths
from motet.data.left_out import LeftOut
from motet.data.media import MediaRef, codec_of
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
    def fingerprint(self) -> str:
        """Equal for two datasets only if each number means the same example of the same lengths in both."""

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

    def takes_rows(self, phase: str) -> bool:
        """Whether items of a phase have rows of their own in the sequence."""

    def where(self, example_id: int) -> str:
        """The example, for messages."""

    def leave_out(self, example_ids: Int64Array, reason: Callable[[int], str]) -> None:
        """Leave out examples that need more memory than a rank has; those behind them get lower numbers.

        example_ids: int64 [n], those that are named first. reason: of example_ids[number], in words, by number.
        Raises UserError if nothing is left.
        """


def files_by_codec(
    dataset: Examples, num_examples: int, weight: Float64Array | None = None
) -> dict[tuple[str, str], list[MediaRef]]:
    """(phase, codec) -> the files of `num_examples` examples that stand for all of a dataset, evenly spread; of each
    of its examples, if it has fewer.

    weight: float64 [num_examples of the dataset], how often each is taken, in any unit: then so many examples stand
            for all in any case, some of them several times.
    """
    if weight is None:
        count = min(dataset.num_examples, num_examples)
        chosen = np.unique(np.linspace(0, dataset.num_examples - 1, count).round().astype(np.int64))
    else:
        taken = np.cumsum(weight)
        chosen = np.searchsorted(taken, (np.arange(num_examples) + 0.5) / num_examples * taken[-1])
    found: dict[tuple[str, str], list[MediaRef]] = {}
    for number in chosen.tolist():
        for ref in dataset.media_refs(number):
            for phase in dataset.readers_of(ref):
                found.setdefault((phase, codec_of(ref)), []).append(ref)
    return found
