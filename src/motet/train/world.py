"""The ranks of a job: alone, under torchrun, or on a process group that the caller has made.

Besides the devices' own group there are host (gloo) groups, a group a thread: collectives of one group must come in the
same order on all ranks, and threads have no order among them.

Where all ranks are on one machine, what they open to find and to reach each other listens on that machine alone.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from motet.core.errors import JointUserError, RankFailure, UserError, note_origin

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MEETING_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE_S = 30.0
"""In which ranks usually find each other; after it, one says what it waits for."""


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
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank, on every rank; for the main thread."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all ranks; for the main thread."""
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
        raise RankFailure(f"rank {rank} failed with {kind}: {text}") from failure


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
    Raises UserError where a CUDA device is asked for and there is none, and for an environment that is incomplete.
    Whatever leaves the block tells by its Origin which rank it is of, and whether another rank has failed before.
    """
    place = _device(device)
    borrowed, store, launch = dist.is_initialized(), None, ""
    if not borrowed:
        with _says_what_it_waits_for():
            meeting = meeting or _meeting()
            _init_process_group(place, meeting)
        store, launch = meeting.store, meeting.launch
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ranks_per_node = _number("LOCAL_WORLD_SIZE", num_ranks)
    control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    try:
        yield World(rank, num_ranks, ranks_per_node, place, control, saving, launch)
    except BaseException as error:
        note_origin(error, rank=rank if num_ranks > 1 else None, speaks=store is None or _is_first_to_fail(store, rank))
        raise
    # Not after an error: other ranks may be inside a collective, which leaving the groups would wait for.
    if not borrowed:
        dist.destroy_process_group()


def _is_first_to_fail(store: dist.Store, rank: int) -> bool:
    """The rank that is the cause is the first to come here: the others fail when they lose their connections to it."""
    try:
        return bool(store.compare_set("failed", "", str(rank)) == str(rank).encode())
    except RuntimeError:
        return True  # The store's process has ended; said twice is better than not at all.


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "run.device = 'cuda', but PyTorch finds no CUDA device; 'auto' or 'cpu' would train on the CPU."
        )
    local_rank, num_devices = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    # The same on all ranks of the machine, so that one of them can say it for all.
    if (num_local := max(_number("LOCAL_WORLD_SIZE", 1), local_rank + 1)) > num_devices:
        raise UserError(
            f"{num_local} ranks are started on a machine with {num_devices} GPUs, and each needs one of its own: start "
            f"torchrun with --nproc-per-node {num_devices}, or set run.device = 'cpu'."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _init_process_group(device: torch.device, meeting: Meeting) -> None:
    if is_on_one_machine() and _LOOPBACK_INTERFACE in (interface for _, interface in socket.if_nameindex()):
        for name in _INTERFACE_VARIABLES:
            # Backends take the interface of the machine's name otherwise, which others can reach.
            os.environ.setdefault(name, _LOOPBACK_INTERFACE)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(
        backend, store=meeting.store, rank=meeting.rank, world_size=meeting.num_ranks, device_id=device_id
    )


def is_on_one_machine() -> bool:
    """Whether the environment says that all ranks run on this machine.

    MASTER_ADDR does not tell: in a cluster's first pod it may be "localhost", and something else in the others.
    """
    return "RANK" not in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def open_store(host: str, port: int, *, serves: bool) -> dist.TCPStore:
    """A store of all ranks: the one that serves listens, on this machine alone where it holds all ranks.

    port: 0 takes a free one, where it serves.
    """
    if not is_on_one_machine():
        return dist.TCPStore(host, port, is_master=serves, wait_for_workers=False)
    if not serves:
        return dist.TCPStore(LOOPBACK, port)
    # By itself TCPStore listens on all interfaces.
    listener = socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _meeting() -> Meeting:
    """That of the environment, or of this rank alone."""
    if "RANK" not in os.environ:
        return Meeting(dist.HashStore(), 0, 1)
    if missing := [name for name in _MEETING_VARIABLES if not os.environ.get(name)]:
        raise UserError(
            f"The environment has RANK = {os.environ['RANK']!r} and no {' and no '.join(missing)}: start ranks with "
            "torchrun, which sets all of them, or unset RANK to run alone."
        )
    rank, num_ranks = _number("RANK"), _number("WORLD_SIZE")
    if not rank < num_ranks:
        raise UserError(f"The environment has RANK = {rank} and WORLD_SIZE = {num_ranks}; ranks count from 0.")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not is_on_one_machine():
        store = next(iter(dist.rendezvous("env://")))[0]
    else:
        store = open_store(LOOPBACK, _number("MASTER_PORT"), serves=rank == 0)
    # torchrun keeps one store over its restarts: whoever comes first names the launch, for all ranks and attempts.
    launch = store.compare_set("motet/launch", "", uuid4().hex).decode()
    # Under its own prefix, an attempt finds no addresses of dead ranks.
    store = dist.PrefixStore(f"motet/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return Meeting(store, rank, num_ranks, launch)


def _number(name: str, default: int | None = None) -> int:
    """A variable of the environment that torchrun sets. Raises UserError if it is no number."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UserError(f"The environment has {name} = {text!r}, which must be a whole number; torchrun sets it.")
    return int(text)


@contextmanager
def _says_what_it_waits_for() -> Iterator[None]:
    """Where some ranks were never started, the others would wait for them without a word."""
    env = os.environ.get
    where = f"{env('MASTER_ADDR')}:{env('MASTER_PORT')}"
    sentence = f"Rank {env('RANK')} waits for the others of {env('WORLD_SIZE')} ranks to come to {where}."
    timer = threading.Timer(_PATIENCE_S, lambda: print(sentence, file=sys.stderr, flush=True))
    timer.daemon = True
    if "RANK" in os.environ and env("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
