"""What a rank measures by itself."""

import math
import os
import subprocess
import sys
import time

import pytest

from motet.train.report.metrics import core_wait_s

WORK_S = 0.3
"""Of the processor: many slices of any scheduler."""


@pytest.fixture
def one_core():
    if not hasattr(os, "sched_setaffinity") or math.isnan(core_wait_s()):
        pytest.skip("this system does not count what a thread waits for a core")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def other_work(one_core):
    """A process that keeps the same core busy."""
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        busy.stdout.readline()
        yield
        busy.kill()


def seconds_of(action):
    """What it takes by the clock, and what of that was waiting for a core."""
    start_s, waited_s = time.perf_counter(), core_wait_s()
    action()
    return core_wait_s() - waited_s, time.perf_counter() - start_s


def test_work_beside_others_on_its_core_waits_for_it(other_work):
    def work():
        start_s = time.process_time()
        while time.process_time() - start_s < WORK_S:
            pass

    waited_s, taken_s = seconds_of(work)
    # Two that share a core have half of it each; where more do, all wait longer.
    assert WORK_S / 4 < waited_s < taken_s


def test_sleep_is_no_waiting_for_a_core(one_core):
    waited_s, taken_s = seconds_of(lambda: time.sleep(WORK_S))
    # Waking up may take a while on a busy core.
    assert waited_s <= taken_s - WORK_S


@pytest.mark.parametrize("text", [None, "", "0 0 0", "x y z"])
def test_what_a_kernel_does_not_count_is_not_known(monkeypatch, text):
    def read_text(path):
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr("motet.train.report.metrics.Path.read_text", read_text)
    assert math.isnan(core_wait_s())
