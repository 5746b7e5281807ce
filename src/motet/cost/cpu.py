"""Measures this machine's CPU, without torch: operations, copied bytes and sent bytes a second of one rank.

A second process has one thread, as each of several ranks would. It multiplies matrices of 512 x 512 (peak FLOP/s) and
copies 32 MB (memory bandwidth). Then the two processes send each other messages through pipes (the link). The best of
several repeats counts, since other programs on the machine only slow it down. All of it takes less than a second, once
a process.

The second process runs this file, so it imports nothing of its own package.
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
    """The figures of one rank. flops_per_s: by precision. memory_bytes: of the whole machine."""

    num_cores: int
    flops_per_s: dict[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float


@cache
def measured_cpu() -> CpuFigures:
    """The figures of this machine, measured at the first call."""
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

            return _fastest_s(there_and_back)

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
    """Run the second process: measure, send the figures, then send back every message."""
    figures = np.array([_matmul_flops(np.float32), _matmul_flops(np.float64), _copied_bytes_per_s()])
    received, sent = sys.stdin.buffer, sys.stdout.buffer
    sent.write(figures.tobytes())
    sent.flush()
    while header := received.read(8):
        sent.write(received.read(int.from_bytes(header, "little")))
        sent.flush()


def _matmul_flops(dtype: type[np.floating[Any]]) -> float:
    a: NDArray[Any] = np.ones((MATRIX_DIM, MATRIX_DIM), dtype=dtype)
    out = np.empty_like(a)
    return float(2 * MATRIX_DIM**3 / _fastest_s(lambda: np.matmul(a, a, out=out)))


def _copied_bytes_per_s() -> float:
    source = np.ones(COPIED_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    return COPIED_BYTES / _fastest_s(lambda: np.copyto(target, source))


def _fastest_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of NUM_REPEATS calls."""
    durations_s = []
    for _ in range(NUM_REPEATS):
        start_s = time.perf_counter()
        work()
        durations_s.append(time.perf_counter() - start_s)
    return min(durations_s)


if __name__ == "__main__":
    _peer()
