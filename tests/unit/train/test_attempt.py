"""Ranks that torchrun has started meet in one attempt, whatever those before them have left in the store."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch.distributed as dist

from motet.core.errors import has_waited_in_vain, origin_of
from motet.train.attempt import agreed_attempt


@pytest.fixture(autouse=True)
def nobody_ends_them(monkeypatch):
    monkeypatch.setattr("motet.train.attempt.stay_until_told", lambda: None)


def meet(store, order, num_ranks=3, limit_s=20.0):
    """The attempts that ranks find which come in this order."""
    with ThreadPoolExecutor(num_ranks) as pool:
        found = []
        for rank in order:
            found.append(pool.submit(agreed_attempt, store, rank, num_ranks, limit_s))
            sleep(0.1)
        return [each.result()[0] for each in found]


def test_ranks_that_start_before_the_first_one_wait_for_its_attempt():
    """As where torchrun on their machine was the first to start them again."""
    store = dist.HashStore()
    assert meet(store, (2, 1, 0)) == [1, 1, 1]
    assert meet(store, (1, 2, 0)) == [2, 2, 2]
    assert meet(store, (0, 2, 1)) == [3, 3, 3]
    assert meet(store, (1, 0), num_ranks=2) == [4, 4], "on fewer machines"
    _, here = agreed_attempt(store, 0, 1, 1.0)
    here.set("key", "value")
    assert not agreed_attempt(store, 0, 1, 1.0)[1].check(["key"])


def test_an_attempt_that_died_before_all_had_come_is_not_met_in():
    store = dist.HashStore()
    with pytest.raises(RuntimeError):
        agreed_attempt(store, 0, 2, 0.1)
    assert meet(store, (1, 0), num_ranks=2) == [2, 2]


@pytest.mark.parametrize("before", [0, 1], ids=["first attempt", "second attempt"])
def test_who_waits_in_vain_says_once_who_has_not_come(before):
    for come, missing in (((0, 2), "rank 1 has not come"), ((1, 2), "rank 0 has not come")):
        store = dist.HashStore()
        for _ in range(before):
            meet(store, (0, 1, 2))
        errors = in_vain(store, come)
        assert all(has_waited_in_vain(error) and "300ms" in str(error) for error in errors)
        said = [origin_of(error).others for error in errors if origin_of(error).speaks]
        assert said == [f", as {missing}"]


def in_vain(store, come):
    """The errors of two ranks of three that wait for the third together."""
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(agreed_attempt, store, rank, 3, 0.3) for rank in come]
        return [each.exception() for each in waiting]


def said_of(store, come, age_s, limit_s=0.3):
    """What ranks of three say that come one after another, at that age, each when the one before has ended in vain."""
    errors = []
    for rank in come:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("motet.train.attempt._age_s", lambda: age_s)
            with pytest.raises(RuntimeError) as failed:
                agreed_attempt(store, rank, 3, limit_s)
        errors.append(failed.value)
    return [origin_of(error).others.removeprefix(", as ") for error in errors if origin_of(error).speaks]


@pytest.mark.parametrize("before", [0, 1], ids=["first attempt", "second attempt"])
def test_the_rank_that_was_named_is_silent_when_it_comes(before):
    for others, late in (((1, 2), 0), ((0, 2), 1)):
        store = dist.HashStore()
        for _ in range(before):
            meet(store, (0, 1, 2))
        errors = in_vain(store, others)
        assert sum(origin_of(error).speaks for error in errors) == 1
        assert said_of(store, [late], age_s=0.5) == []


def test_ranks_that_are_started_again_say_anew_who_has_not_come():
    """As each of them is started behind those that have spoken; it is not known who they are."""
    store = dist.HashStore()
    assert said_of(store, (1, 1), age_s=0.1) == ["ranks 0, 2 have not come"] * 2
    assert said_of(store, (0, 0), age_s=0.1) == ["ranks 1, 2 have not come"] * 2
    assert meet(store, (1, 2, 0)) == [3, 3, 3]
    assert said_of(store, (2, 2), age_s=0.1) == ["rank 0 has not come"] * 2
