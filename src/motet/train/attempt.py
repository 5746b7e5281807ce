"""Which attempt of a launch this is: ranks agree on it in their store, which torchrun keeps when it restarts them.

torchrun on each machine counts restarts by itself: where a rank has died it counts one more, and where it joins the
others again it does not. So its count is another on other machines, and ranks that met by it would wait for each other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from motet.core.errors import note_origin
from motet.train.watch import come, stay_until_told, who_came, who_is_missing

_NUMBER, _MET, _TOLD = "attempts", "met", "told"
"""Keys: of the newest attempt; of one: the marks of the ranks that have met in it; who was the last to say that it has
waited in vain. A rank speaks if nobody has since it came: one that was started again has other ranks to wait for.
"""
_LOOK_EVERY_S = 0.02


def agreed_attempt(store: dist.Store, rank: int, num_ranks: int, limit_s: float) -> tuple[int, dist.Store]:
    """The number of the attempt, from 1, the same on all ranks, and the part of the store that is its own.

    Rank 0 begins an attempt. Others may read of the one before, whose ranks are gone. So each leaves a mark of its own
    where it reads of an attempt, and rank 0 says which marks it has met: who is not among them looks on.
    Raises RuntimeError if not all ranks come within `limit_s`; it says who has not.
    """
    mark, told, age_s = uuid4().hex, store.compare_set(_TOLD, "", ""), _age_s()
    number, end_s = store.add(_NUMBER, int(rank == 0)), time.monotonic() + limit_s
    attempt = _come(store, number, rank, mark)
    while True:
        if rank == 0 and (marks := who_came(attempt, num_ranks)):
            attempt.set(_MET, " ".join(marks))
        if attempt.check([_MET]) and mark in attempt.get(_MET).decode().split():
            return number, attempt
        if time.monotonic() > end_s:
            break
        time.sleep(_LOOK_EVERY_S)
        if number != (newest := store.add(_NUMBER, 0)):
            number, attempt = newest, _come(store, newest, rank, mark)
    # 1. Who came later than others wait is the one that they have named.
    was_named = told != b"" and age_s > limit_s
    speaks = not was_named and store.compare_set(_TOLD, told.decode(), mark) == mark.encode()
    # 2. In an attempt that is over, all have come: rank 0 has begun no other.
    is_over = rank > 0 and attempt.check([_MET])
    missing = "rank 0 has not come" if is_over else who_is_missing(attempt, num_ranks)
    if not speaks:
        stay_until_told()
    error = RuntimeError(f"wait timeout after {limit_s * 1e3:.0f}ms, as not all ranks have come")
    note_origin(error, rank=rank, speaks=speaks, others=f", as {missing}" if missing else "")
    raise error


def _come(store: dist.Store, number: int, rank: int, mark: str) -> dist.Store:
    attempt = dist.PrefixStore(f"attempt_{number}", store)
    come(attempt, rank, mark)
    return attempt


def _age_s() -> float:
    """How long ago this process was started; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
