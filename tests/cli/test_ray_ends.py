"""Ray that a run starts itself: it ends with the run, and after a crash; signals that reach a run do not reach it."""

import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli.meddling import Meddling, motet
from cli.on_ranks import motet_under_agent
from cli.test_stop import STEP, arguments
from cli.tiny_job import losses

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra motet[ray] is not installed"),
]
SERVED = ("data.heldout=[]", "data.service=ray", "data.num_workers=1")


def processes_of_ray() -> set[str]:
    """Processes that Ray runs as, by number."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"/ray/core/src/ray/" in command or command.startswith(b"ray::"):
            found.add(folder.name)
    return found


def wait_for_end(before: set[str]) -> None:
    deadline = time.monotonic() + 120
    while left := processes_of_ray() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_two_ranks_share_a_ray_that_ends_with_them(job, tmp_path):
    before = processes_of_ray()
    done = motet_under_agent(2, *arguments(job, tmp_path, *SERVED, "run.steps=3"))
    assert (done.returncode, len(losses(tmp_path))) == (0, 3), done.stderr
    assert "Ray decodes: 1 actor of each rank, in a cluster of this run, with a node" in done.stdout
    wait_for_end(before)


@pytest.mark.slow
def test_a_signal_to_the_group_of_the_rank_loses_nothing(job, tmp_path):
    before = processes_of_ray()
    leader = Meddling("motet.train.trainer:train", 1, 0, "os.setpgid(0, 0)")
    to_group = Meddling(STEP, 2, 0, "stop(signal.SIGTERM, -os.getpid())")
    done = motet(*arguments(job, tmp_path, *SERVED), meddling=[leader, to_group])
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "Asked to stop: step 2 is saved" in done.stdout
    assert len(losses(tmp_path)) == 2
    wait_for_end(before)


@pytest.mark.slow
def test_ray_ends_after_a_crash(job, tmp_path):
    before = processes_of_ray()
    killed = Meddling(STEP, 2, 0, "os.kill(os.getpid(), signal.SIGKILL)")
    done = motet(*arguments(job, tmp_path, *SERVED), meddling=killed)
    assert done.returncode == -signal.SIGKILL
    wait_for_end(before)


def test_without_ray_the_command_that_installs_it_is_said(job, tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('gone')")
    without = Meddling("motet.train.trainer:train", 1, 0, f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    done = motet(*arguments(job, tmp_path / "run", *SERVED), meddling=without)
    assert done.returncode == 2
    assert 'data.service = "ray" needs Ray, which is not installed (gone); run pip install "motet[ray]".' in done.stderr
