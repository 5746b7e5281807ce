"""Knows of the other ranks of a job: whose process is gone, and who waits where.

A rank that is stopped or slow keeps its connections: it is waited for (`run.wait_limit_s`). The system closes those of
a process that is gone. So rank r listens to rank r - 1, on a connection that carries nothing until that rank leaves.
What one rank notices, all read in the store, wherever they are: they end within 12 s, by themselves or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from motet.core.errors import has_lost_rank, has_waited_in_vain, origin_of
from motet.crash import end_rank
from motet.runtime.groups import new_group

_LOOK_EVERY_S = 2.0
"""How often a rank looks in the store whether any is gone."""
_LEAVING_S = 30.0
"""How long a rank that leaves waits for the one before, which leaves at about the same time."""
_GRACE_S = 12.0
"""In this time a rank ends by itself if another is gone: its own error says more. After it, it is ended."""
_ANSWER_S = 5.0
"""Ranks whose limit of waiting ends in this time, too, wait themselves; the others are those that are missing. A rank
that is gone is noticed in it by the one that listens to it.
"""
_FOR_EVER = timedelta(days=365)
_NOTICE_S = 1.0
"""The first rank to fail speaks in this time; the others stay so long."""


class Watch:
    """Watches the other ranks from one rank.

    store: that in which the ranks met; it has room for keys of this class.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._looking = store.clone()  # A store serves one thread at a time.
        self._has_left = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Begin to watch; `fail` may be called before. A collective, and so is `leave`."""
        self._group = new_group(backend="gloo")
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("listen", self._listen), ("look", self._look))
        ]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Leave in order, so that nobody takes this rank for lost; and wait until the rank before leaves, too.

        Its last word would else come while this process ends: a thread that returns from torch then aborts it.
        """
        self._has_left.set()
        with suppress(RuntimeError):
            dist.send(torch.zeros(1), (self._rank + 1) % self._num_ranks, group=self._group)
        for thread in self._threads:
            thread.join(_LEAVING_S)

    def fail(self, error: BaseException) -> tuple[bool, str]:
        """Tell the others that this rank fails; returns whether it is the first, and `Origin.others`.

        The cause fails first: others fail as they lose their connections. Ranks that wait in vain fail together.
        """
        try:
            is_first = is_first_to_fail(self._store, self._rank)
            if has_waited_in_vain(error):
                return is_first, self._who_waits(origin_of(error).action, is_first)
            gone = self._who_is_gone() if has_lost_rank(error) else ""
            return is_first, gone if is_first else ""
        except RuntimeError:
            return True, ""  # The store's process has ended; two sentences are better than none.

    def stay_until_another_fails(self) -> None:
        """Stay until the rank has spoken whose failure this rank has been told of."""
        with suppress(RuntimeError):  # The store's process has ended.
            _until(lambda: self._store.check(["failed"]), 2 * _ANSWER_S)
        stay_until_told()

    def _who_waits(self, action: str, is_first: bool) -> str:
        self._store.set(f"waits/{self._rank}", action or "no action of a step")
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        if not is_first:  # The first must speak before torchrun ends all ranks, which it does when one has ended.
            _until(lambda: self._store.check(["told"]), 2 * _ANSWER_S)
            stay_until_told()
            return ""
        _until(lambda: self._store.check([f"waits/{rank}" for rank in others]), _ANSWER_S)
        waiting = {rank: self._store.get(f"waits/{rank}") for rank in others if self._store.check([f"waits/{rank}"])}
        self._store.set("told", "")
        if missing := [rank for rank in others if rank not in waiting]:
            return f", as {_ranks(missing)} not come and not ended"
        return ", as all ranks wait: " + ", ".join(
            f"rank {rank} at {where.decode()}" for rank, where in waiting.items()
        )

    def _who_is_gone(self) -> str:
        """Stays until it is known: a rank that ends before would be taken for the one that is gone."""
        _until(lambda: self._store.check(["gone"]), _ANSWER_S)
        return f"rank {self._store.get('gone').decode()}" if self._store.check(["gone"]) else ""

    def _listen(self) -> None:
        before = (self._rank - 1) % self._num_ranks
        try:
            if (message := dist.irecv(torch.zeros(1), before, group=self._group)) is not None:
                message.wait(_FOR_EVER)
        except RuntimeError:
            with suppress(RuntimeError):
                self._looking.compare_set("gone", "", str(before))

    def _look(self) -> None:
        while not self._has_left.wait(_LOOK_EVERY_S):
            try:
                is_gone = self._looking.check(["gone"])
            except RuntimeError:
                is_gone = True  # The store is gone, and so is the rank, or the torchrun, that served it.
            if is_gone and not self._has_left.wait(_GRACE_S):
                self._end()

    def _end(self) -> None:
        """End this rank, which is anywhere; the first to fail says why."""
        # Without the store nobody knows who is first: two sentences are better than none.
        sentence = f"motet, rank {self._rank}: lost the process that started the ranks and serves their store."
        with suppress(RuntimeError):
            gone = self._looking.get("gone").decode()
            is_first = is_first_to_fail(self._looking, self._rank)
            sentence = f"motet, rank {self._rank}: lost rank {gone}, which died without a word." if is_first else ""
        end_rank(sentence)


def come(store: dist.Store, rank: int, mark: str = "") -> None:
    """Let the other ranks know that this one has come to their meeting, in its store. mark: what it leaves there."""
    store.set(f"came/{rank}", mark)


def who_came(store: dist.Store, num_ranks: int) -> list[str]:
    """The marks of all ranks, once all of them have come; [] before."""
    keys = [f"came/{rank}" for rank in range(num_ranks)]
    return [store.get(key).decode() for key in keys] if store.check(keys) else []


def who_is_missing(store: dist.Store, num_ranks: int) -> str:
    """Which ranks have not come to a meeting, in words."""
    missing = [rank for rank in range(num_ranks) if not store.check([f"came/{rank}"])]
    return f"{_ranks(missing)} not come" if missing else ""


def is_first_to_fail(store: dist.Store, rank: int) -> bool:
    """Whether no other rank has failed before this one, in its store. That one speaks for all."""
    return store.compare_set("failed", "", str(rank)) == str(rank).encode()


def stay_until_told() -> None:
    """Stay until another rank has spoken: torchrun ends all ranks when one has ended."""
    time.sleep(_NOTICE_S)


def _until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Wait until something is so, or for `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.05)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
