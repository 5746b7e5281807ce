"""Ray actors as the workers of a pool: they decode on other machines, or in a Ray of the run (`ray_server.py`).

An actor runs the same handler as a worker process, so items have the same bytes. Its result lies in Ray's object store
until the rank has copied it, which is at once: the store holds one result of each actor at most.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.data.ray_connection import (
    check_listens,
    connected_address,
    own_signals,
    ray_package,
    token_variables,
    why_of_ray,
)
from motet.data.worker import Death, HandlerParts
from motet.data.worker_process import answer, pickled, unpickled

_START_LIMIT_S = 120.0
"""An actor starts in seconds; after this time there is no CPU for it."""
_LOOK_EVERY_S = 1.0
_CHECK_EVERY_S = 5.0
"""How often tasks see to it that Ray's head is there."""
_HEAD_LIMIT_S = 25.0
"""A head that is restarted is back by then. Ray ends a process that has not reached its head for 60 s."""
_NODE_LIMIT_S = 90.0
"""A node that lives answers in seconds. Of one that does not, Ray says so after about 15 s to a minute."""
_DECIDES_BYTES = ("motet", "numpy", "pillow", "soundfile", "scipy", "av")
"""Packages of which another version may make other bytes of a file."""


class RayCluster:
    """This process's connection to a Ray cluster, and what its actors do there.

    address: "host:port". Close it, or use it in a `with` block.
    """

    def __init__(self, address: str, num_actors: int, token: str = "") -> None:
        """Connect to a cluster that runs. Raises UserError if it cannot be reached or cannot hold the actors.

        address: "host:port", or "auto": that of the node that runs on this machine. num_actors: of all ranks.
        token:   of a `RayServer`.
        """
        os.environ |= token_variables(token)
        self._store_bytes: dict[int, int] = {}
        self._checked_s, self._lock = time.monotonic(), threading.Lock()
        self.address = connected_address(address=address)
        num_cpus = int(ray_package().cluster_resources().get("CPU", 0))
        if num_cpus < num_actors:
            self.close()
            raise UserError(
                f"data.num_workers asks for {counted_words(num_actors, 'actor')} over all ranks, with a CPU each, and "
                f"the Ray cluster at {self.address} has {num_cpus} CPUs; start more nodes, or lower it."
            )

    @property
    def num_nodes(self) -> int:
        """Nodes of the cluster that are alive."""
        return sum(node["Alive"] for node in ray_package().nodes())

    @property
    def store_bytes(self) -> int:
        """The largest result that each actor of this rank has put into the store, summed: the most it has held."""
        return sum(self._store_bytes.values())

    def start_actor(self, handler: HandlerParts, limit_s: float) -> RayActor:
        """A worker of this cluster: `StartWorker`."""
        return RayActor(self, handler, limit_s)

    def check_head(self, every_s: float = _CHECK_EVERY_S) -> None:
        """Raise UserError if Ray's head has been gone for `_HEAD_LIMIT_S`: Ray itself would end this process.

        every_s: seconds for which the last look counts.
        """
        with self._lock:
            begun_s = time.monotonic()
            if begun_s - self._checked_s < every_s:
                return
            while True:
                try:
                    check_listens(self.address)
                    self._checked_s = time.monotonic()
                    return
                except UserError as error:
                    if time.monotonic() - begun_s > _HEAD_LIMIT_S:
                        raise UserError(
                            f"Ray's head at {self.address} has ended, and with it what decodes; start it again, and "
                            "the same command goes on from the last checkpoint."
                        ) from error
                time.sleep(_LOOK_EVERY_S)

    def answers(self, node: str) -> bool:
        """Whether a node of the cluster, by its id, can still run something."""
        ray = ray_package()
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        look = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(versions)
        try:
            ray.get(look.remote(), timeout=_NODE_LIMIT_S)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return False
        return True

    def note_result(self, actor: int, num_bytes: int) -> None:
        """Note a result that an actor has put into the store."""
        self._store_bytes[actor] = max(self._store_bytes.get(actor, 0), num_bytes)

    def close(self) -> None:
        """Leave the cluster, with the actors of this process."""
        with own_signals():
            ray_package().shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RayActor:
    """One actor, as a `Worker` of a pool.

    process_id: on its node; 0 until it is ready.
    """

    name = "actor"

    def __init__(self, cluster: RayCluster, handler: HandlerParts, limit_s: float) -> None:
        self._cluster, self._limit_s = cluster, limit_s
        # A node's death should leave each rank some.
        remote = ray_package().remote(num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")
        head, contents = pickled(handler)
        self._create = partial(remote(HandlerActor).remote, head, [bytes(each) for each in contents])
        self._actor = self._create()
        self._node_id, self._node, self.process_id = "", "", 0

    def ready(self, may_wait: Callable[[], bool]) -> None:
        """As `Worker.ready`. Raises UserError where no node has a CPU free, or has other versions of what decodes."""
        self._node_id, self._node, self.process_id, theirs, failure = self._about(may_wait)
        ours = versions()
        if other := next((name for name in ours if ours[name] != theirs.get(name)), None):
            raise UserError(
                f"Ray's node {self._node} has {other} {theirs.get(other) or 'not at all'}, and this rank has {other} "
                f"{ours[other]}, so items could come out otherwise: install the same on both."
            )
        if failure:
            raise UserError(f"On Ray's node {self._node}, {failure.rstrip('.')}.")

    def _about(self, may_wait: Callable[[], bool]) -> tuple[str, str, int, dict[str, str], str]:
        """What the actor says of itself, as soon as it runs."""
        ray = ray_package()
        about, deadline_s = self._actor.about.remote(), time.monotonic() + _START_LIMIT_S
        while True:
            try:
                return ray.get(about, timeout=_LOOK_EVERY_S)  # type: ignore[no-any-return]
            except ray.exceptions.GetTimeoutError as error:
                self._cluster.check_head()
                if may_wait():
                    deadline_s = time.monotonic() + _START_LIMIT_S
                elif time.monotonic() > deadline_s:
                    raise UserError(
                        f"No node of the Ray cluster at {self._cluster.address} has had a CPU free for an actor within "
                        f"{_START_LIMIT_S:g} s; start more nodes, end what else runs there, or lower data.num_workers."
                    ) from error
            except ray.exceptions.RayError as error:
                # The node on which it should start may just have died.
                is_by_node = isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed
                if is_by_node and (may_wait() or time.monotonic() < deadline_s):
                    time.sleep(_LOOK_EVERY_S)
                    self._actor = self._create()
                    about = self._actor.about.remote()
                    continue
                raise UserError(
                    f'An actor of data.service = "ray" cannot start: {why_of_ray(error)}; each node of Ray must have '
                    "Motet, of the same version as here."
                ) from error

    def run(self, task: Any) -> tuple[bool, Any]:
        """As `Worker.run`. The result is copied out of the store, which then drops it."""
        ray = ray_package()
        self._cluster.check_head()
        try:
            head, *contents = ray.get(self._actor.run.remote(task), timeout=self._limit_s)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except ray.exceptions.RayError as error:
            raise EOFError(why_of_ray(error)) from error
        self._cluster.note_result(id(self), len(head) + sum(each.nbytes for each in contents))
        succeeded, value = unpickled(head, [each.copy().data for each in contents])
        return bool(succeeded), value

    def cause_of_death(self, error: Exception) -> Death:
        """As `Worker.cause_of_death`. Ray itself names no cause before it knows that a node is dead."""
        self._cluster.check_head(0)  # Without a head, Ray does not answer.
        self.end()
        where = f" on node {self._node} (process {self.process_id})"
        if isinstance(error, TimeoutError):
            return Death(f"gave no answer within {self._limit_s:g} s{where}")
        if self._cluster.answers(self._node_id):
            return Death(f"died{where}")
        return Death(f"died with its node {self._node}", by_task=False)

    def kill(self) -> None:
        """As `Worker.kill`."""
        self.end()

    def end(self) -> None:
        """As `Worker.end`."""
        ray = ray_package()
        if ray.is_initialized():
            ray.kill(self._actor)


class HandlerActor:
    """The actor's side: it runs a handler, as `workers.serve` does.

    head, contents: the function that makes it, and its arguments, as `pickled` gave them. Files of the user's own that
    they name may be missing here.

    failure: what is wrong with the handler here, in words; "" if nothing.
    """

    def __init__(self, head: bytes, contents: Sequence[bytes]) -> None:
        self.failure = ""
        try:
            make_handler, args = unpickled(head, [memoryview(each) for each in contents])
            self._handler = make_handler(*args)
        except UserError as error:
            self.failure = str(error)

    def about(self) -> tuple[str, str, int, dict[str, str], str]:
        """The node's id and name, the number of the process, the versions that decide what a file becomes, and
        `failure`."""
        node = ray_package().get_runtime_context().get_node_id()
        return node, socket.gethostname(), os.getpid(), versions(), self.failure

    def run(self, task: Any) -> list[Any]:
        """(succeeded, result or exception) in parts, of which the store keeps arrays as they are."""
        head, contents = pickled(answer(self._handler, task))
        return [head, *(np.frombuffer(each, dtype=np.uint8) for each in contents)]


def versions() -> dict[str, str]:
    """The versions, here, of what decides the bytes of an item."""
    found = {"Python": platform.python_version()}
    for package in _DECIDES_BYTES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
