"""Run one function on several ranks of a gloo process group, cheaply: `from ranks import run_ranks`.

Ranks are forked from one server process that has imported torch already: four of them start in a quarter of a second.
The function and its arguments are pickled: the function must be defined at the top of a module.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
    "torch.utils.tensorboard",
    "motet.train.trainer",
    "motet.train.planned_job",
    "motet.planning.plan_first",
]
"""What ranks would else import one by one: a second or two of each."""
TIMEOUT_S = 600
"""What still runs then is taken to hang: many times what any test takes, so that slow machines pass all the same.

That of pytest-timeout, in pyproject.toml, is longer, so that a test whose ranks hang shows their stacks.
"""
GRACE_S = 2.0
"""After one rank has failed, the time the others get to fail too, so that the test shows what each of them saw."""


class RankFailed(AssertionError):
    """At least one rank raised or died; the text holds their tracebacks, the first to fail first."""


class RanksHung(AssertionError):
    """Not all ranks ended in time; the text holds the Python stack of each that was still running."""


def run_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = TIMEOUT_S, on_gpus: bool = False
) -> list[Any]:
    """Call fn(rank, num_ranks, *args) on every rank of a fresh default process group; return the results in rank order.

    on_gpus: each rank has a CUDA device of its own, whose tensors go over NCCL.
    Raises RankFailed or RanksHung; no process is left over in any case.
    """
    context = start_server()
    with tempfile.TemporaryDirectory(prefix="motet-ranks-") as folder:
        # Plain pickle, not multiprocessing's: tensors go by value, not as handles that die with their process.
        payload = pickle.dumps((fn, args))
        server = multiprocessing.forkserver._forkserver._forkserver_address
        receivers: list[Connection] = []
        processes = []
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank,
                    args=(payload, rank, num_ranks, folder, timeout_s, on_gpus, sender, server),
                    daemon=False,
                )
                process.start()
                sender.close()
                receivers.append(receiver)
                processes.append(process)
            return _collect(receivers, processes, Path(folder), timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for receiver in receivers:
                receiver.close()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def start_server() -> Any:
    """The context whose server is started once per session, with one thread a process from the very import of torch."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


def _run_rank(
    payload: bytes,
    rank: int,
    num_ranks: int,
    folder: str,
    timeout_s: float,
    on_gpus: bool,
    sender: Connection,
    server: str,
) -> None:
    _share_server(server)
    # The file stays open as long as the process lives: SIGUSR1, and any crash, write the stacks into it.
    stacks = open(Path(folder) / f"stacks-{rank}", "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    gc.freeze()  # Else each collection reads, and thereby copies, all that the server has imported.
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        fn, args = pickle.loads(payload)
        # Collectives outlast the parent's patience, so that a hang is seen as a hang with its stacks.
        timeout = timedelta(seconds=timeout_s + 60)
        rendezvous = f"file://{folder}/rendezvous"
        if on_gpus:
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=timeout)
        try:
            message = pickle.dumps((True, fn(rank, num_ranks, *args)))
            if dist.is_initialized():
                dist.barrier()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(message)
    sender.close()


def _share_server(address: str) -> None:
    """Processes that this one forks from a server are forked from its own: another would import everything anew."""
    own = multiprocessing.forkserver._forkserver
    own._forkserver_address = address
    own.ensure_running = multiprocessing.resource_tracker.ensure_running


def _collect(receivers: list[Connection], processes: list[Any], folder: Path, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    rank_of = {receiver: rank for rank, receiver in enumerate(receivers)}
    deadline = time.monotonic() + timeout_s
    while rank_of and time.monotonic() < deadline:
        for receiver in wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(receiver, Connection)
            rank = rank_of.pop(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                processes[rank].join()
                crash = (folder / f"stacks-{rank}").read_text()
                succeeded, value = False, f"died with exit code {processes[rank].exitcode}\n{crash}"
            (results if succeeded else failures)[rank] = value
            if not succeeded and len(failures) == 1:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
    if rank_of:
        hung = sorted(rank_of.values())
        raise RanksHung(f"ranks {hung} still ran after {timeout_s} s\n{_stacks(hung, processes, folder)}")
    return [results[rank] for rank in range(len(receivers))]


def _stacks(ranks: list[int], processes: list[Any], folder: Path) -> str:
    for rank in ranks:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    return "\n".join(f"rank {rank}:\n{(folder / f'stacks-{rank}').read_text()}" for rank in ranks)
