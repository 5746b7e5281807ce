"""The batches of a training loop of one's own: loaded, decided and exchanged in a thread, steps ahead of the loop.

    loader -> examples of this rank -> exchange -> RankBatch -> queue       exchange mode (loop_exchange.py)
    sampler -> numbers -> decision -> loader -> RankBatch -> queue          index mode (loop_index.py)

All ranks iterate alike: see loop_thread.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from motet.assign.orchestrator import Orchestrator
from motet.balance import ACTIVE_BACKEND, Packed
from motet.core.errors import ArgumentError, JointUserError, UserError
from motet.core.workload import BACKBONE
from motet.dispatch.agreement import gather, joint_error
from motet.dispatch.batch import RankBatch
from motet.dispatch.loaded import LoadedExample, Measure
from motet.dispatch.loop_exchange import ExchangeSource
from motet.dispatch.loop_index import IndexSource, phases_of
from motet.dispatch.loop_source import LoopSource
from motet.dispatch.loop_thread import LoopThread


def prefetched(
    loader: Iterable[Sequence[LoadedExample | None]],
    measures: Mapping[str, Measure] | None = None,
    *,
    orchestrator: Orchestrator | None = None,
    group: dist.ProcessGroup | None = None,
    accumulate: int = 1,
    steps_ahead: int = 2,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Prefetched:
    """Iterate over balanced batches in place of a loader's own. A collective: all ranks call it with the same options.

    loader:       what this rank iterates over without Motet, e.g. a DataLoader with a DistributedSampler. Its workers
                  only load and decode, so it may have any number of them.
    measures:     per encoder phase, lengths and rows of items from their sizes. With them the mode is exchange: the
                  loader's batches are lists of LoadedExample (`collate_fn=list`), None for one that could not be
                  loaded, and items are sent to the rank that computes them. Without them the mode is index: the
                  loader's dataset is an `ExampleParts`, and each rank loads only what it will compute.
    orchestrator: what is balanced, at what cost; by default all phases, each packed, by the lengths of its items.
    group:        the ranks that share a batch; default: all.
    accumulate:   microbatches (batches of the loader) whose gradients are added up before the optimizer steps; the last
                  step of an epoch has those that are left. `batch.ends_step` says behind which the optimizer steps.
    steps_ahead:  steps that are loaded before they are asked for.
    device:       where batches are put; by default they stay on the CPU. dtype: of media; by default float32.

    Raises UserError if a loader or an option cannot be used, or if ranks were given different options.

    Example, on each rank of a process group:
        for batch in prefetched(loader, {"image": patches}, device=device):
            loss = batch.scale_sum(model(batch))
            loss.backward()
    """
    if not dist.is_initialized():
        raise UserError(
            "prefetched exchanges examples between ranks and there is no process group; call "
            "torch.distributed.init_process_group first, also for one rank."
        )
    if accumulate < 1 or steps_ahead < 1:
        raise ArgumentError(f"accumulate is {accumulate} and steps_ahead is {steps_ahead}; both must be 1 or more.")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    moves = dist.new_group(ranks, use_local_synchronization=True)
    source: LoopSource | None = None
    error: Exception | None = None
    described: tuple = ()
    try:
        phases = tuple(measures) if measures is not None else phases_of(loader)
        orchestrator = orchestrator or _all_packed(phases, len(ranks))
        if "split" in orchestrator.methods:
            raise ValueError(
                'the method "split" cuts sequences, which only `motet train` runs; leave it out of methods'
            )
        if orchestrator.num_ranks != len(ranks) or set(orchestrator.encoders) != set(phases):
            raise ArgumentError(
                f"the orchestrator is for {orchestrator.num_ranks} ranks and phases {list(orchestrator.encoders)}; "
                f"the group has {len(ranks)} ranks and the examples have phases {list(phases)}."
            )
        source = (
            IndexSource(loader, orchestrator, host)
            if measures is None
            else ExchangeSource(loader, orchestrator, measures, host)
        )
        options = (measures is None, orchestrator.encoders, sorted(orchestrator.balanced), accumulate, ACTIVE_BACKEND)
        described = (repr(options), source.num_ahead, _length(loader))
    except Exception as failure:
        error = failure
    everywhere = gather(described, host)
    if () in everywhere:
        raise joint_error(error, host)
    assert source is not None
    if len({options for options, _, _ in everywhere}) > 1:
        raise JointUserError(
            "Ranks were given different options of prefetched (mode, phases, what is balanced, accumulate, or a Motet "
            "without its native core), so they would not decide alike; give all ranks the same."
        )
    source.num_ahead = max(ahead for _, ahead, _ in everywhere)
    lengths = [length for _, _, length in everywhere]
    length = None if None in lengths else max(lengths)
    return Prefetched(source, host, moves, length, accumulate, steps_ahead, device, dtype)


def _all_packed(phases: Sequence[str], num_ranks: int) -> Orchestrator:
    costs = {phase: Packed() for phase in (BACKBONE, *phases)}
    return Orchestrator(costs, num_ranks, costs)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


class Prefetched(IterableDataset):
    """What `prefetched` returns: in each epoch all ranks iterate over the same number of RankBatches.

    A rank whose loader ends before the others' goes on with what other ranks have loaded; a warning says so. Leaving
    the loop early ends the thread, and the workers of the loader, when all ranks have left.
    It is an IterableDataset, so that a trainer that wants a DataLoader gets one: `DataLoader(batches, batch_size=None)`
    with 0 workers. Do not let accelerate prepare that: it would read all batches on one rank.

    Example, on each rank:
        batches = prefetched(loader, measures)
        batches.load_state_dict(saved)  # of an earlier run, to go on behind its last batch
        for batch in batches: ...
    """

    def __init__(
        self,
        source: LoopSource,
        host: dist.ProcessGroup,
        moves: dist.ProcessGroup,
        length: int | None,
        accumulate: int,
        steps_ahead: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._source, self._host, self._moves, self._length = source, host, moves, length
        self._accumulate, self._steps_ahead = accumulate, steps_ahead
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._first_batch, self._num_taken, self._is_between_steps = 0, 0, True
        self._source_state: Any = None
        self._thread: LoopThread | None = None

    def __len__(self) -> int:
        """Batches of an epoch, the same on all ranks. Raises TypeError if the loader of a rank has no length."""
        if self._length is None:
            raise TypeError("the loader has no length")
        return self._length

    def __iter__(self) -> Iterator[RankBatch]:
        if self._thread is not None:
            self._thread.close()
        self._num_taken, self._first_batch = self._first_batch, 0
        self._thread = thread = LoopThread(
            self._source, self._host, self._num_taken, self._accumulate, self._steps_ahead, self._prepare
        )
        try:
            while (step := thread.next_step()) is not None:
                for batch, state in step:
                    self._num_taken, self._source_state = self._num_taken + 1, state
                    self._is_between_steps = batch.ends_step
                    yield batch if self._device is None else batch.to(self._device, non_blocking=True)
            self._num_taken, self._source_state = 0, None
        finally:
            thread.close()

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the loader or its sampler, which shuffles by it. Call it between epochs."""
        self._source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that the loop has taken in this epoch; 0 behind an epoch's last.

        `is_between_steps`: whether that batch ended a step; the last step of an epoch may be a short one.
        """
        return {
            "num_batches": self._num_taken,
            "is_between_steps": self._is_between_steps,
            "loader": self._source_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next epoch behind a saved position; a loader with `load_state_dict` is given its own state.

        The sampler must be as it was: for a DistributedSampler, call `set_epoch`. Raises UserError for a position
        inside a step.
        """
        first = int(state["num_batches"])
        if not state.get("is_between_steps", first % self._accumulate == 0):
            raise UserError(
                f"The state was saved after {first} batches, inside a step of {self._accumulate} microbatches; save it "
                "after a step of the optimizer."
            )
        self._first_batch, self._num_taken, self._is_between_steps = first, first, True
        self._source_state = state["loader"]
        self._source.load_state(state["loader"])

    def _prepare(self, batch: RankBatch) -> RankBatch:
        """The work on a batch that the thread can do."""
        batch = replace(batch, group=self._moves)
        if self._dtype is not None:
            batch = batch.to("cpu", dtype=self._dtype)
        return batch if self._device is None else batch.ready_for(self._device)
