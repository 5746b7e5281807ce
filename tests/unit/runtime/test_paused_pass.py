"""A pass in a thread of its own, which runs in its turns alone."""

import threading
import time
from functools import partial

import pytest
import torch

from motet.core.errors import origin_of
from motet.runtime.clock import ActionClock
from motet.runtime.executor import Executor, RankProgram
from motet.runtime.paused_pass import PausedPass
from motet.schedule.program import Action, Kind
from motet.tensor_parallel import RowParts, TensorRanks


def rows():
    return RowParts(TensorRanks(None, 0, 2))


def summing(heard, of_pass, paused):
    """Two blocks, of two sums each, and one sum behind them."""
    for block in range(2):
        paused.until(2 * block)
        with paused.pausing(2 * (block + 1)):
            for number in range(2):
                heard.append(f"half {2 * block + number}")
                of_pass.meanwhile(True)
    of_pass.meanwhile(True)
    heard.append("end")


def test_a_pass_pauses_at_the_sums_of_its_blocks_and_not_at_others():
    heard, of_pass = [], rows()
    paused = PausedPass(partial(summing, heard, of_pass), [of_pass], [])
    for number in range(5):
        heard.append(f"turn {number}")
        paused.go_on(number)
        assert of_pass.meanwhile is None, "the next pass waits for its sums, or pauses by itself"
    assert heard == [
        *(each for number in range(4) for each in (f"turn {number}", f"half {number}")),
        *("turn 4", "end"),
    ]
    assert paused.has_ended


def test_a_pass_without_sums_keeps_to_the_parts_of_the_others():
    """Ranks without items meet others where their blocks begin and where the pass ends."""
    heard = []

    def run(paused):
        for block in range(2):
            paused.until(2 * block)
            heard.append(block)
        paused.until(4)
        heard.append("end")

    paused, after = PausedPass(run, [], []), []
    for number in range(5):
        paused.go_on(number)
        after.append(list(heard))
    assert after == [[0], [0], [0, 1], [0, 1], [0, 1, "end"]]


def test_passes_are_in_turns_and_take_over_threads_that_are_free():
    heard, threads, ids = [], [], set()

    def run(name, paused):
        for number in range(3):
            paused.until(number)
            ids.add(threading.get_ident())
            heard.append(f"{name}{number}")

    first, second = (PausedPass(partial(run, name), [], threads) for name in "ab")
    for number in range(3):
        first.go_on(number)
        second.go_on(number)
    assert heard == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert len(threads) == len(ids) == 2
    PausedPass(partial(run, "c"), [], threads).go_on(2)
    assert heard[6:] == ["c0", "c1", "c2"] and len(ids) == 2


def test_an_error_is_that_of_the_part_that_goes_on():
    def run(paused):
        paused.until(1)
        raise ValueError("lost")

    paused = PausedPass(run, [], [])
    row = (Action(0, Kind.F, 0, 0), Action(1, Kind.F, 0), Action(0, Kind.F, 0, 2))
    program, clock = RankProgram(row, {0: "image", 1: "backbone"}, {0: (), 1: ()}), ActionClock(0, torch.device("cpu"))
    handle = lambda action: paused.go_on(action.part // 2) if action.stage == 0 else None  # noqa: E731
    with pytest.raises(ValueError, match="lost") as raised:
        Executor(program, {Kind.F: handle}, clock, in_parts=(Kind.F,)).run(0)
    assert origin_of(raised.value).action == "0F0.2 of step 1"


def test_a_pass_that_nobody_goes_on_with_ends_where_it_paused():
    ended, threads = [], []

    def run(paused):
        try:
            paused.until(1)
            ended.append("went on")
        finally:
            ended.append("left")

    paused = PausedPass(run, [], threads)
    paused.go_on(0)
    paused.leave()
    for _ in range(1000):
        if threads:
            break
        time.sleep(0.01)
    assert ended == ["left"] and len(threads) == 1
