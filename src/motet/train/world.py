"""The ranks of a job: alone, under torchrun, or on a process group that the caller has made.

Besides the devices' own group there are host (gloo) groups, a group a thread: collectives of one group must come in the
same order on all ranks, and threads have no order among them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from motet.core.errors import UserError


class JointUserError(UserError):
    """A UserError that all ranks raise alike, so that one of them is enough to print it."""


@dataclass(frozen=True)
class World:
    """One rank's place among all.

    control: host group for the main thread; saving: for the thread that writes checkpoints. (That of the prefetch
    thread belongs to the runtime's Mesh.) launch: the same for all attempts of one torchrun; "" without torchrun.
    """

    rank: int
    num_ranks: int
    ranks_per_node: int
    device: torch.device
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    launch: str = ""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank, on every rank; for the main thread."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        dist.barrier(self.control)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails inside on any rank fails on all: a UserError with its sentence, else with a description.

        The ranks that did not fail would otherwise wait for those that did.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = None if failure is None else (isinstance(failure, UserError), str(failure), type(failure).__name__)
        failed = [(rank, *entry) for rank, entry in enumerate(self.gather(told)) if entry is not None]
        if not failed:
            return
        if failure is not None and not isinstance(failure, UserError):
            raise failure
        rank, is_user_error, text, kind = failed[0]
        if is_user_error:
            raise JointUserError(text) from failure
        raise RuntimeError(f"rank {rank} failed with {kind}: {text}") from failure


class Meeting(NamedTuple):
    """Where ranks find each other, and which of how many this one is. launch: as World has it."""

    store: dist.Store
    rank: int
    num_ranks: int
    launch: str = ""


@contextmanager
def join_world(device: str, meeting: Meeting | None = None) -> Iterator[World]:
    """The World, from torchrun's environment where there is one, else of one rank; left and torn down at the end.

    device: "auto", "cpu" or "cuda". meeting: in the place of torchrun's.
    Raises UserError where a CUDA device is asked for and there is none.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = _device(device, local_rank)
    borrowed = dist.is_initialized()
    launch = ""
    if not borrowed:
        meeting = meeting or _meeting()
        _init_process_group(place, meeting)
        launch = meeting.launch
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)))
    control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    try:
        yield World(rank, num_ranks, ranks_per_node, place, control, saving, launch)
    except UserError as error:
        if rank and not isinstance(error, JointUserError):
            # The command line prints what rank 0 raises; this has happened here alone.
            print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        raise
    # Not after an error: other ranks may be inside a collective, which leaving the groups would wait for.
    if not borrowed:
        dist.destroy_process_group()


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "run.device = 'cuda', but PyTorch finds no CUDA device; 'auto' or 'cpu' would train on the CPU."
        )
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"Local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}, so start "
            f"torchrun with --nproc-per-node {torch.cuda.device_count()}, or set run.device = 'cpu'."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _init_process_group(device: torch.device, meeting: Meeting) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, store=meeting.store, rank=meeting.rank, world_size=meeting.num_ranks, device_id=device_id
    )


def _meeting() -> Meeting:
    """Torchrun's, or of this rank alone."""
    if "RANK" not in os.environ:
        return Meeting(dist.HashStore(), 0, 1)
    store, rank, num_ranks = next(iter(dist.rendezvous("env://")))
    # torchrun keeps one store over its restarts: whoever comes first names the launch, for all ranks and attempts.
    launch = store.compare_set("motet/launch", "", uuid4().hex).decode()
    # Under its own prefix, an attempt finds no addresses of dead ranks.
    store = dist.PrefixStore(f"motet/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return Meeting(store, rank, num_ranks, launch)
