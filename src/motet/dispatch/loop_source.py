"""Where the batches of a loop of one's own come from: what the two modes have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, IterableDataset

from motet.dispatch.batch import RankBatch


class Status(IntEnum):
    """What a rank says of itself after each microbatch."""

    READY = 0
    ENDED = 1
    CLOSING = 2
    FAILED = 3


@dataclass(frozen=True, eq=False)
class LoopTurn:
    """What one turn of a source gave on this rank.

    batch:        None if the rank has failed.
    num_left_out: examples that could not be loaded, over all ranks.
    state:        the loader's own state behind this batch; None if it keeps none.
    """

    status: Status
    batch: RankBatch | None = None
    error: Exception | None = None
    num_left_out: int = 0
    state: Any = None


class LoopSource(Protocol):
    """Batches of one epoch at a time. All methods but `set_epoch` and `load_state` are called in the thread.

    num_ahead: microbatches that are decided before they are loaded; the same on all ranks.
    """

    num_ahead: int

    def begin(self, first_batch: int) -> None:
        """Begin an epoch behind its first batches."""

    def turn(self, *, is_closing: bool) -> LoopTurn:
        """The next microbatch. A collective: it never raises what this rank alone sees, but returns it."""

    def end(self) -> None:
        """End the epoch, and the workers of the loader."""

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to whatever shuffles."""

    def load_state(self, state: Any) -> None:
        """Give the loader its own state."""


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of a loader, or else of its samplers."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    for shuffles in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if hasattr(shuffles, "set_epoch"):
            shuffles.set_epoch(epoch)
            return


class Skipping:
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, first_batch: int) -> None:
        self._batch_sampler, self._first_batch = batch_sampler, first_batch

    def __iter__(self) -> Iterator:
        return islice(iter(self._batch_sampler), self._first_batch, None)


def behind(loader: Any, first_batch: int) -> Iterator:
    """Iterate over a loader behind its first batches, which are not loaded if the loader samples by number."""
    samples = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    if first_batch and samples and loader.batch_sampler is not None:
        return iter(like(loader, loader.dataset, Skipping(loader.batch_sampler, first_batch)))
    return islice(iter(loader), first_batch, None)


def like(loader: DataLoader, dataset: Dataset, batch_sampler: Any, collate: Any = None) -> DataLoader:
    """A DataLoader with the workers of another one."""
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate or loader.collate_fn,
        num_workers=loader.num_workers,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        generator=loader.generator,
    )
