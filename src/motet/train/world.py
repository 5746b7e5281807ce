"""The ranks of a job: one alone, those of torchrun, or those of a process group that the caller has made.

Beside the device's process group, each thread with collectives has a host (gloo) group of its own: collectives of one
group must come in the same order on all ranks, and threads have no common order.

If all ranks are on one machine, their sockets listen on the loopback interface only.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import accumulate, count
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from motet.core.errors import JointUserError, RankFailure, Stopped, UserError, note_origin, origin_of
from motet.core.heap import share_heap
from motet.core.nodes import node_of_ranks, ranks_by_node
from motet.core.words import counted_words
from motet.runtime.groups import new_group
from motet.runtime.mesh import of_other_examples
from motet.train.attempt import agreed_attempt
from motet.train.watch import Watch, come, is_first_to_fail, stay_until_told, who_is_missing

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MEETING_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WAIT_LIMIT_S = 600.0
"""How long a rank waits for another that is alive, if the recipe does not say (`run.wait_limit_s`)."""
_MEETINGS = count()
"""Numbers of the Meetings of this process; ranks come to all of them together."""
_ENDED, _FAILED = "ended", "failed"
"""The key by which ranks that have no part in a phase learn that it has ended, and what it says if that failed."""
_HEARD = "heard"
"""The key under which these count themselves then."""
_LOOK_EVERY_S, _HEARD_S = 0.5, 30.0
"""How often they look, and how long the first rank waits for them."""
_PATIENCE_S = 30.0
"""Ranks usually find each other in this time. After it, the first rank of each machine prints what it waits for."""


@dataclass(frozen=True)
class World:
    """The ranks of a job, seen from one rank, and the host groups on which they agree.

    by_node: the number of ranks of each machine, in order.
    control: host group of the main thread.
    saving:  host group of the thread that writes checkpoints. (The prefetch thread uses `Mesh.host_group`.)
    launch:  an id that all attempts of one torchrun share; "" without torchrun.
    is_restarted: whether torchrun has started the ranks anew, after a crash of some.

    Example:
        >>> cpu = torch.device("cpu")
        >>> worlds = [World(rank, 2, by_node=(2,), device=cpu, control=None, saving=None) for rank in range(2)]
        >>> [world.is_first for world in worlds]
        [True, False]
    """

    rank: int
    num_ranks: int
    by_node: tuple[int, ...]
    device: torch.device
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    launch: str = ""
    is_restarted: bool = False

    @property
    def on_node(self) -> range:
        """The ranks of this one's machine."""
        stops = list(accumulate(self.by_node))
        node = bisect_right(stops, self.rank)
        return range(stops[node] - self.by_node[node], stops[node])

    @property
    def num_nodes(self) -> int:
        """Of machines."""
        return len(self.by_node)

    @property
    def ranks_per_node(self) -> int:
        """The ranks of the machine with most of them: of each, where torchrun's ranks are all used."""
        return max(self.by_node)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank, in order of ranks; for the main thread. A collective."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def replicas(self, tensor_size: int) -> World:
        """The ranks that run other examples than this one: one of each group of tensor-parallel ranks. A collective.

        Such a group counts as on the machine of its first rank, as all of its ranks must decide alike.
        """
        if tensor_size == 1:
            return self
        return replace(
            self,
            rank=self.rank // tensor_size,
            num_ranks=self.num_ranks // tensor_size,
            by_node=ranks_by_node(node_of_ranks(self.by_node, self.num_ranks)[::tensor_size].tolist()),
            control=of_other_examples(tensor_size, backend="gloo"),
        )

    def barrier(self) -> None:
        """Wait for all ranks; for the main thread."""
        dist.barrier(self.control)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Fail on all ranks if the block fails on any: otherwise the others would wait for that rank. A collective.

        Raises JointUserError on all ranks if the first failure is a UserError. Any other exception is raised again on
        its rank, and as RankFailure on the others.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
        mine = None if failure is None else (isinstance(failure, UserError), str(failure), type(failure).__name__)
        failed = [(rank, *entry) for rank, entry in enumerate(self.gather(mine)) if entry is not None]
        if not failed:
            return
        if failure is not None and not isinstance(failure, UserError):
            raise failure
        rank, is_user_error, text, kind = failed[0]
        if is_user_error:
            raise JointUserError(text) from failure
        raise RankFailure(f"rank {rank} failed with {kind}: {text}") from failure


def borrowed_world() -> World:
    """The World of a process group that the caller has initialised, and destroys. A collective."""
    # Of the group's backends; without a name in init_process_group, `get_backend` says none.
    is_on_gpu = "nccl" in dist.get_backend_config() and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
    return _world(device, None, None)


def _world(device: torch.device, meeting: Meeting | None, used: Sequence[int] | None) -> World:
    """The World of the process group. meeting: of the ranks, if the group was made for it. used: as of `join_world`.

    A collective. Raises as `_on_even_nodes`.
    """
    num_ranks = dist.get_world_size()
    local = StartedRanks.at_hand().ranks_per_node if used else max(_number("LOCAL_WORLD_SIZE", num_ranks), 1)
    by_node = ranks_by_node(each // local for each in used or range(num_ranks))
    world = World(dist.get_rank(), num_ranks, by_node, device, new_group(backend="gloo"), new_group(backend="gloo"))
    if meeting is not None:
        world = replace(world, launch=meeting.launch, is_restarted=meeting.is_restarted)
    return _on_even_nodes(world, local)


def _on_even_nodes(world: World, local: int) -> World:
    """The same world. local: how many ranks torchrun has started on this machine. A collective.

    Raises JointUserError if machines have different numbers of ranks: every rank decides by itself which ranks share a
    machine, and all must decide alike.
    """
    counts = world.gather(local)
    if other := next((rank for rank, count in enumerate(counts) if count != counts[0]), 0):
        raise JointUserError(
            f"Rank 0 is one of {counted_words(counts[0], 'rank')} on its machine and rank {other} one of "
            f"{counts[other]:,}, and all machines must have as many: start torchrun with the same --nproc-per-node on "
            "each, which sets LOCAL_WORLD_SIZE."
        )
    return world


class Meeting(NamedTuple):
    """The store in which ranks find each other, this rank, and the number of ranks.

    launch, is_restarted: as in `World`.
    """

    store: dist.Store
    rank: int
    num_ranks: int
    launch: str = ""
    is_restarted: bool = False


class StartedRanks(NamedTuple):
    """What torchrun's environment says: this rank, and how many are started, in all and on this machine.

    Example: six ranks on machines of three.
        >>> StartedRanks(rank=5, num_ranks=6, ranks_per_node=3).num_nodes
        2
    """

    rank: int
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Of machines."""
        return -(-self.num_ranks // self.ranks_per_node)

    @staticmethod
    def at_hand() -> StartedRanks:
        """One rank, where there is no such environment. Raises UserError for what is no number there."""
        num_ranks = _number("WORLD_SIZE", 1)
        return StartedRanks(_number("RANK", 0), num_ranks, max(_number("LOCAL_WORLD_SIZE", num_ranks), 1))


@contextmanager
def join_world(
    device: str,
    meeting: Meeting | None = None,
    *,
    wait_limit_s: float = WAIT_LIMIT_S,
    used: Sequence[int] | None = None,
    in_phase: bool = False,
) -> Iterator[World]:
    """The World of torchrun's environment if there is one, else of one rank; destroyed when the block ends.

    device:  "auto", "cpu" or "cuda".
    meeting: used instead of torchrun's.
    wait_limit_s: how long a rank waits for another that is alive.
    used: the ranks of torchrun's environment that are the World, ascending; the others must not come. None: all.
    in_phase: others `stay_away`, as they may come to another phase.
    Raises UserError if "cuda" is set and there is no CUDA device, if the environment is incomplete, and if ranks cannot
    connect; JointUserError if machines have different numbers of ranks. An exception that leaves the block gets an
    Origin: its rank, and whether another rank has failed before.
    """
    chosen_device = _device(device)
    share_heap(chosen_device.type)
    borrowed, watch = dist.is_initialized(), None
    is_watched = not borrowed and meeting is None  # Trials, which have a Meeting, are watched by their parents.
    if not borrowed:
        _check_interfaces()
        with _print_if_ranks_are_late():
            meeting = meeting or _meeting(wait_limit_s, used, in_phase)
            _init_process_group(chosen_device, meeting, timedelta(seconds=wait_limit_s))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if is_watched and meeting is not None and num_ranks > 1:
        watch = Watch(meeting.store, rank, num_ranks)
    away = meeting.store if in_phase and used is not None and meeting is not None and rank == 0 else None
    try:
        if watch is not None:
            watch.begin()
        with _ending_for_all():
            yield _world(chosen_device, None if borrowed else meeting, used)
    except BaseException as error:
        note_origin(error, rank=rank if num_ranks > 1 else None)
        if away is not None:
            with suppress(RuntimeError):
                away.set(_ENDED, _FAILED)
        if watch is not None:
            _tell(watch, error)
        raise
    # Not after an error: destroying the groups would wait for other ranks that are inside a collective.
    if watch is not None:
        watch.leave()
    if away is not None and used is not None:
        away.set(_ENDED, "")
        num_away = StartedRanks.at_hand().num_ranks - len(used)
        end_s = time.monotonic() + _HEARD_S  # The process that serves the store may be this one, and end now.
        while away.add(_HEARD, 0) < num_away and time.monotonic() < end_s:
            time.sleep(_LOOK_EVERY_S / 10)
    if not borrowed:
        dist.destroy_process_group()


def stay_away(wait_limit_s: float) -> None:
    """Wait for the end of a phase that this rank has no part in. Raises RankFailure where it fails on other ranks.

    wait_limit_s: how long to wait for the process that serves the store.
    """
    store = _meeting(wait_limit_s, None, in_phase=True).store
    with suppress(RuntimeError):  # That process has ended, and with it the phase.
        while not store.check([_ENDED]):
            time.sleep(_LOOK_EVERY_S)
        failed = store.get(_ENDED)
        store.add(_HEARD, 1)
        if not failed:
            return
    raise RankFailure("a phase in which this rank has no part has failed on the others")


@contextmanager
def _ending_for_all() -> Iterator[None]:
    """Raise RuntimeError for the SystemExit of code that Motet calls: its rank would end in order, without the others.

    It would end with a code that says that all is done, perhaps.
    """
    try:
        yield
    except Stopped:
        raise
    except SystemExit as end:
        ended = RuntimeError(f"sys.exit({'' if end.code is None else repr(end.code)}) was called before the end")
        note_origin(ended, **vars(origin_of(end)))
        raise ended.with_traceback(end.__traceback__) from end


def _tell(watch: Watch, error: BaseException) -> None:
    """Tell the other ranks of a failure, and note what they tell; of one that all ranks have alike, nothing."""
    if isinstance(error, JointUserError | Stopped):
        watch.leave()
        return
    # torchrun ends all ranks when one has ended; this one ends by itself, when it has said why.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if isinstance(error, RankFailure):
        watch.stay_until_another_fails()
    else:
        speaks, others = watch.fail(error)
        note_origin(error, speaks=speaks, others=others)


def _device(name: str) -> torch.device:
    """The device of this rank, made the current one. name: "auto", "cpu" or "cuda". Raises UserError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "run.device = 'cuda', but PyTorch finds no CUDA device; 'auto' or 'cpu' would train on the CPU."
        )
    local_rank, num_devices = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    # All ranks of the machine come to the same sentence, so that one of them can print it.
    if (num_local := max(_number("LOCAL_WORLD_SIZE", 1), local_rank + 1)) > num_devices:
        raise UserError(
            f"{counted_words(num_local, 'rank')} would run on a machine with {counted_words(num_devices, 'GPU')}, and "
            f"each needs one of its own: start torchrun with --nproc-per-node {num_devices}, or set run.device = 'cpu'."
        )
    torch.cuda.set_device(local_rank)
    # cuDNN's attention, which Hopper prefers, plans anew for each shape: 5 to 10 ms of the host a call. No two steps of
    # ragged lengths have one shape (docs/log.md).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", local_rank)


def _init_process_group(device: torch.device, meeting: Meeting, wait_limit: timedelta) -> None:
    if is_on_one_machine() and _LOOPBACK_INTERFACE in (interface for _, interface in socket.if_nameindex()):
        for name in _INTERFACE_VARIABLES:
            # Backends take the interface of the machine's name otherwise, which others can reach.
            os.environ.setdefault(name, _LOOPBACK_INTERFACE)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    # NCCL's monitor would take a rank that was stopped for one that hangs, and abort it when it goes on.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(math.ceil(2 * wait_limit.total_seconds())))
    come(meeting.store, meeting.rank)
    try:
        dist.init_process_group(
            backend,
            timeout=wait_limit,
            store=meeting.store,
            rank=meeting.rank,
            world_size=meeting.num_ranks,
            device_id=device_id,
        )
    except RuntimeError as error:
        _explain(error, meeting)
        raise


def _check_interfaces() -> None:
    """Raise UserError if gloo is told to use a network interface that is not there."""
    there = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in there:
            raise UserError(
                f"GLOO_SOCKET_IFNAME names {name!r}, a network interface that {socket.gethostname()} does not have; it "
                f"has {', '.join(there)}."
            )


def _explain(error: RuntimeError, meeting: Meeting) -> None:
    """Note who has not come, on one rank. Raises UserError or RankFailure if all have and cannot connect."""
    is_first = is_first_to_fail(meeting.store, meeting.rank)
    missing = who_is_missing(meeting.store, meeting.num_ranks)
    if not is_first:
        stay_until_told()
    note_origin(error, rank=meeting.rank, speaks=is_first, others=f", as {missing}" if missing else "")
    if missing:
        return
    if not is_first:
        raise RankFailure("another rank has failed to connect") from error
    refused = UserError(
        f"it cannot connect to the other ranks, though all have come ({str(error).splitlines()[0]}); let "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface by which the machines reach each other."
    )
    note_origin(refused, rank=meeting.rank)
    raise refused from error


def is_on_one_machine() -> bool:
    """Whether the environment says that all ranks run on this machine.

    MASTER_ADDR does not show it: in a cluster it may be "localhost" in the first pod and a name in the others.
    """
    return "RANK" not in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def open_store(host: str, port: int, *, serves: bool) -> dist.TCPStore:
    """The store that all ranks share. It listens on the loopback interface only if all ranks are on this machine.

    serves: this rank holds the store, the others connect to it.
    port:   0 lets the rank that serves take a free port.
    """
    if not is_on_one_machine():
        return dist.TCPStore(host, port, is_master=serves, wait_for_workers=False)
    if not serves:
        return dist.TCPStore(LOOPBACK, port)
    # TCPStore listens on all interfaces unless it is given a socket.
    listener = socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _meeting(wait_limit_s: float, used: Sequence[int] | None, in_phase: bool) -> Meeting:
    """The Meeting that torchrun's environment describes, or of this rank alone. Raises UserError.

    used, in_phase: as of `join_world`.
    """
    if "RANK" not in os.environ:
        if (num_ranks := _number("WORLD_SIZE", 1)) > 1:
            raise UserError(
                f"The environment has WORLD_SIZE = {num_ranks} and no RANK, and this process would train alone: start "
                "ranks with torchrun, which sets both, or unset WORLD_SIZE."
            )
        return Meeting(dist.HashStore(), 0, 1)
    if missing := [name for name in _MEETING_VARIABLES if not os.environ.get(name)]:
        raise UserError(
            f"The environment has RANK = {os.environ['RANK']!r} and no {' and no '.join(missing)}: start ranks with "
            "torchrun, which sets all of them, or unset RANK to run alone."
        )
    rank, num_ranks = _number("RANK"), _number("WORLD_SIZE")
    if not rank < num_ranks:
        raise UserError(f"The environment has RANK = {rank} and WORLD_SIZE = {num_ranks}; ranks count from 0.")
    started = rank, num_ranks
    if used is not None:
        rank, num_ranks = used.index(rank), len(used)
    # Ranks that are left over in a phase stay: the same rank serves the store in all of them.
    comes = started if in_phase else (rank, num_ranks)
    try:
        store = _launch_store(*comes, _number("MASTER_PORT"), wait_limit_s)
    except (dist.DistError, OSError) as error:
        raise UserError(
            f"Rank {rank} cannot meet the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({str(error).splitlines()[0].rstrip('.')}); MASTER_ADDR and MASTER_PORT, which torchrun sets, must be "
            "the machine of rank 0 and a free port of it."
        ) from error
    launch, number, store = _attempt(store, *comes, wait_limit_s)
    # With a prefix of its own, a training phase does not read the addresses of ranks in the phase before.
    store = dist.PrefixStore(f"meeting_{next(_MEETINGS)}", store)
    is_restarted = number > 1 or _number("TORCHELASTIC_RESTART_COUNT", 0) > 0
    return Meeting(store, rank, num_ranks, launch, is_restarted)


@cache
def _attempt(store: dist.Store, rank: int, num_ranks: int, wait_limit_s: float) -> tuple[str, int, dist.Store]:
    """The launch as in `World`, the number of the attempt, and its part of the store: of this process in all phases."""
    # torchrun keeps one store over its restarts, so the first rank of the first attempt names the launch for all.
    launch = store.compare_set("motet/launch", "", uuid4().hex).decode()
    return launch, *agreed_attempt(dist.PrefixStore("motet", store), rank, num_ranks, wait_limit_s)


@cache
def _launch_store(rank: int, num_ranks: int, port: int, wait_limit_s: float) -> dist.Store:
    """The store of all ranks of a launch, which stays for their next Meeting."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not is_on_one_machine():
        return next(iter(dist.rendezvous("env://", rank, num_ranks, timeout=timedelta(seconds=wait_limit_s))))[0]
    return open_store(LOOPBACK, port, serves=rank == 0)


def _number(name: str, default: int | None = None) -> int:
    """An integer variable of the environment, which torchrun sets. Raises UserError if it is not one."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UserError(f"The environment has {name} = {text!r}, which must be a whole number; torchrun sets it.")
    return int(text)


@contextmanager
def _print_if_ranks_are_late() -> Iterator[None]:
    """Print a sentence if the block takes longer than _PATIENCE_S, as it does if some ranks were never started."""
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
