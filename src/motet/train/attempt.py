"""Which attempt of a launch this is: ranks agree on it in their store, which torchrun keeps when it restarts them.

torchrun on each machine counts restarts by itself: where a rank has died it counts one more, and where it joins the
others again it does not. So its count is another on other machines, and ranks that met by it would wait for each other.
"""

from __future__ import annotations

import time
from uuid import uuid4

import torch.distributed as dist

from motet.core.errors import note_origin
from motet.train.watch import come, who_came, who_is_missing

_NUMBER, _MET, _ALONE = "attempts", "met", "alone"
"""Keys: of the newest attempt; of one: the marks of the ranks that have met in it, and who speaks without rank 0."""
_LOOK_EVERY_S = 0.02


def agreed_attempt(store: dist.Store, rank: int, num_ranks: int, limit_s: float) -> tuple[int, dist.Store]:
    """The number of the attempt, from 1, the same on all ranks, and the part of the store that is its own.

    Rank 0 begins an attempt. Others may read of the one before, whose ranks are gone. So each leaves a mark of its own
    where it reads of an attempt, and rank 0 says which marks it has met: who is not among them looks on.
    Raises RuntimeError if not all ranks come within `limit_s`; it says who has not.
    """
    mark, number, end_s = uuid4().hex, store.add(_NUMBER, int(rank == 0)), time.monotonic() + limit_s
    attempt = _come(store, number, rank, mark)
    while True:
        if rank == 0 and (marks := who_came(attempt, num_ranks)):
            attempt.set(_MET, " ".join(marks))
        if attempt.check([_MET]) and mark in attempt.get(_MET).decode().split():
            return number, attempt
        if time.monotonic() > end_s:
            raise _waited(attempt, rank, num_ranks, limit_s)
        time.sleep(_LOOK_EVERY_S)
        if number != (newest := store.add(_NUMBER, 0)):
            number, attempt = newest, _come(store, newest, rank, mark)


def _come(store: dist.Store, number: int, rank: int, mark: str) -> dist.Store:
    attempt = dist.PrefixStore(f"attempt_{number}", store)
    come(attempt, rank, mark)
    return attempt


def _waited(attempt: dist.Store, rank: int, num_ranks: int, limit_s: float) -> RuntimeError:
    """The error of a rank that has waited for others. attempt: the newest of which it knows."""
    error = RuntimeError(f"wait timeout after {limit_s * 1e3:.0f}ms, as not all ranks have come")
    if rank and attempt.check([_MET]):  # One that is over: rank 0 has begun no other.
        speaks, missing = attempt.compare_set(_ALONE, "", str(rank)) == str(rank).encode(), "rank 0 has not come"
    else:
        speaks, missing = who_is_missing(attempt, rank, num_ranks)
    note_origin(error, rank=rank, speaks=speaks, others=f", as {missing}" if missing else "")
    return error
