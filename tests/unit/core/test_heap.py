"""Pages of a step are those of the step before; what the environment says of the heap stays."""

import subprocess
import sys

import pytest

from motet.core.heap import keep_freed_memory, share_heap

FAULTS = """
import resource, torch
from motet.core.heap import keep_freed_memory
kept = keep_freed_memory("cpu")
def step():
    held = [torch.ones(2**20) for _ in range(64)]
step()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


OF_THREADS = """
import resource, sys, threading
from motet.core.heap import keep_freed_memory, share_heap
shared = sys.argv[1] == "shared" and share_heap()
keep_freed_memory()
def step():
    held = [b"1" * 2**24 for _ in range(12)]
def in_thread():
    step()
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    print(shared, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
"""


def faults_of_a_thread(heap):
    """(whether threads share the heap, new pages of what a thread takes and frees, 192 MiB in 12 pieces)."""
    run = [sys.executable, "-c", OF_THREADS, heap]
    shared, count = subprocess.run(run, capture_output=True, text=True, check=True, env={}).stdout.split()
    return shared == "True", int(count)


def faults():
    """(whether freed memory is kept, new pages of a step that takes and frees 256 MiB in 64 tensors)."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env={})
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_a_step_takes_the_pages_of_the_step_before():
    # A process that gives memory back takes all 65,000 pages anew, unless something small lies above them by chance.
    kept, count = faults()
    assert kept and count < 6500


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_a_thread_takes_the_pages_of_its_step_before_where_threads_share_the_heap():
    shared, count = faults_of_a_thread("shared")
    assert shared and count < 50
    # Without, it takes at least what large pages cannot spare.
    assert faults_of_a_thread("apart")[1] > 90


def test_what_the_environment_says_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_freed_memory("cpu") and not share_heap("cpu")


def test_the_heap_beside_a_gpu_stays_as_it_is():
    assert not keep_freed_memory("cuda") and not share_heap("cuda")
