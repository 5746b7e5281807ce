"""What holds for every test: hypothesis draws the same examples in every run; GPU tests are skipped without a GPU."""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tiers import COLLECTED

# No deadline: how long an example takes depends on what else the machine does.
settings.register_profile("motet", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("motet")

# A shell without job control starts what runs in the background with Ctrl-C ignored, which processes inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_process_group_left():
    """A command that fails in the process of the tests leaves its group, with which its own process would end."""
    yield
    if (torch := sys.modules.get("torch")) and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def no_own_modality_left():
    """A process knows a modality of the user's own until it ends; here, until the tests of a file do."""
    yield
    if known := sys.modules.get("motet.core.modalities"):
        known._OWN.clear()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The recipe of a tiny job with text, images and speech, and its data; made once for all tests of a file."""
    from cli.tiny_job import write_tiny_job

    return write_tiny_job(tmp_path_factory.mktemp("job") / "data")


GPU_TESTS = Path(__file__).parent / "gpu"
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
WORKER_BYTES = 2**31
"""What a worker takes at most, with the server of its ranks (`ranks.py`) and four of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """`pytest -n auto`: a worker a core, as long as all of them have the memory that they need."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if CONTAINER_LIMIT.exists() and (limit := CONTAINER_LIMIT.read_text().strip()) != "max":
        memory_bytes = min(memory_bytes, int(limit))
    return max(1, min(len(os.sched_getaffinity(0)), memory_bytes // WORKER_BYTES))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config, items):
    files = config.stash[COLLECTED] = {}
    for item in items:
        files[item.path] = files.get(item.path, False) or item.get_closest_marker("slow") is None
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker("gpu")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
