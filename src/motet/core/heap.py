"""Memory that is freed on the host stays with the process, so that what is computed next finds the same pages."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt (malloc.h)."""
_MOST_KEPT, _LARGEST_KEPT = 2**31 - 1, 2**25
"""Bytes: the most that mallopt takes, and the largest allocation that glibc may keep after it is freed."""
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_freed_memory(device_type: str = "cpu") -> bool:
    """Let glibc keep up to 2 GiB that are free at the end of the heap; returns whether it does.

    device_type: what the process computes on, as torch calls it: the heap beside any other than "cpu" stays as it is.
    A step on a CPU frees its activations and takes as many again, and a search over thousands of ranks its arrays. By
    default glibc gives them back to the kernel as soon as 64 MiB or less are free, and each page that is taken again
    costs a fault of a microsecond: a third of the demo's forward passes. What the environment says of this stays.
    """
    return _set(device_type, (_TRIM_THRESHOLD, _MOST_KEPT), (_MMAP_THRESHOLD, _LARGEST_KEPT))


def share_heap(device_type: str = "cpu") -> bool:
    """Let all threads allocate from the first heap; returns whether they do. Call it before there are other threads.

    device_type: as of `keep_freed_memory`. glibc makes heaps for further threads, and gives back what is freed there
    whatever is said of the first. What workers hand over is allocated in threads: of images of 1,024 pixels a side, a
    third of the seconds that the rank has for it were faults.
    """
    return _set(device_type, (_ARENA_MAX, 1))


def _set(device_type: str, *parameters: tuple[int, int]) -> bool:
    if device_type != "cpu" or sys.platform != "linux" or any(name in os.environ for name in _SET_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Other C libraries have none, or one that does nothing.
    return mallopt is not None and all(mallopt(*parameter) for parameter in parameters)
