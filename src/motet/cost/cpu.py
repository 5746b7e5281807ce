"""What a rank on this machine's CPU computes, copies and sends in a second: measured, in under a second, without torch.

A second process, with one thread as each of several ranks would have, multiplies matrices of 512 x 512 (peak FLOP/s)
and copies 32 MB (memory bandwidth); then the two processes send each other messages through pipes (the link). The best
of several repeats counts, since whatever else the machine does only takes away. Measured once a process.

This file is also what the second process runs, so it imports nothing of its own package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

MATRIX_DIM, COPIED_BYTES, MESSAGE_BYTES, NUM_REPEATS = 512, 1 << 25, 1 << 21, 5
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class CpuFigures:
    """Of one rank. flops_per_s: by precision. memory_bytes: of the whole machine. link_latency_s: of one message."""

    num_cores: int
    flops_per_s: dict[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float


@cache
def measured_cpu() -> CpuFigures:
    """The figures of this machine."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with subprocess.Popen(
        [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _ONE_THREAD
    ) as peer:
        to_peer, from_peer = cast("IO[bytes]", peer.stdin), cast("IO[bytes]", peer.stdout)
        fp32, fp64, copied_bytes_per_s = np.frombuffer(from_peer.read(24), dtype=np.float64).tolist()

        def round_trip_s(size_bytes: int) -> float:
            message = size_bytes.to_bytes(8, "little") + bytes(size_bytes)

            def there_and_back() -> None:
                to_peer.write(message)
                to_peer.flush()
                from_peer.read(size_bytes)

            return _least_seconds(there_and_back)

        small_s, large_s = round_trip_s(1), round_trip_s(MESSAGE_BYTES)
        to_peer.close()
    return CpuFigures(
        num_cores,
        {"fp32": fp32, "fp64": fp64},
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        # A copy reads and writes.
        2 * copied_bytes_per_s,
        2 * MESSAGE_BYTES / max(large_s - small_s, 1e-9),
        small_s / 2,
    )


def _peer() -> None:
    """What the second process does: measures itself, tells, and sends back what it is sent."""
    figures = np.array([_matmul_flops(np.float32), _matmul_flops(np.float64), _copied_bytes_per_s()])
    asked, told = sys.stdin.buffer, sys.stdout.buffer
    told.write(figures.tobytes())
    told.flush()
    while header := asked.read(8):
        told.write(asked.read(int.from_bytes(header, "little")))
        told.flush()


def _matmul_flops(dtype: type[np.floating[Any]]) -> float:
    a: NDArray[Any] = np.ones((MATRIX_DIM, MATRIX_DIM), dtype=dtype)
    out = np.empty_like(a)
    return float(2 * MATRIX_DIM**3 / _least_seconds(lambda: np.matmul(a, a, out=out)))


def _copied_bytes_per_s() -> float:
    source = np.ones(COPIED_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    return COPIED_BYTES / _least_seconds(lambda: np.copyto(target, source))


def _least_seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(NUM_REPEATS):
        start_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - start_s)
    return min(found)


if __name__ == "__main__":
    _peer()
