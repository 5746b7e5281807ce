"""Optimus, Table 7, as benchmarks/bubbles.py has it."""

import pytest

from benchmark import benchmark
from work import num_calls


@pytest.fixture(scope="module")
def bubbles():
    with benchmark("bubbles") as module:
        yield module


@pytest.fixture(scope="module")
def found(bubbles):
    """Per column of the table: with PP bubbles alone."""
    constants = bubbles.optimus.constants()
    searched = []
    for column in bubbles.TABLES_5_7:
        times = bubbles.backbone_times(column, constants, tensor=False)
        searched.append((column, times, bubbles.search(column, constants, times)))
    return searched


@pytest.mark.slow
def test_coarse_placement_hides_what_the_paper_says(found):
    for column, _, search in found:
        assert search.coarse.hidden == pytest.approx(column.coarse, abs=0.005)


def test_coarse_placement_hides_a_share_of_one_over_the_microbatches(found):
    first, *_ = products = [search.coarse.hidden * column.num_microbatches for column, _, search in found]
    assert products == pytest.approx([first] * len(products), rel=0.01)


def test_fine_placement_hides_about_what_the_paper_says(found):
    for column, _, search in found:
        assert search.fine.hidden == pytest.approx(column.fine, abs=0.03)
        assert search.fine.step_s < search.coarse.step_s


def test_the_search_is_short(bubbles, found):
    """Some two million calls, about a second, for what takes the paper's 322."""
    (column, times, _), constants = found[0], bubbles.optimus.constants()
    assert num_calls(lambda: bubbles.search(column, constants, times)) < 5_000_000


def test_the_steps_are_those_that_are_simulated(bubbles, found):
    column, times, search = found[-1]
    for placed in (search.coarse, search.fine):
        assert bubbles.simulated_s(column, times, search.encoders, placed) == pytest.approx(placed.step_s)
