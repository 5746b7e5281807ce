"""What is printed of a search: the winner in words, and what of it is recomputed."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from motet.core.plan import Plan, Unit
from motet.planner.candidate import Pins
from motet.planner.report import distinct, figures, print_result, recomputed_in_words, remarks, winner_in_words
from motet.planner.search import search
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.planner.strategies import STRATEGIES
from unit.planner.jobs import job


@cache
def found() -> SearchResult:
    return search(job(), STRATEGIES)


def printed(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_result(found(), console)
    return console.file.getvalue()


def chain(schedule: str, again: tuple[int, ...]) -> Plan:
    given = job()
    counts = ({"image": 6, "audio": 1}, {"audio": 3, "backbone": 1}, {"backbone": 5}, {"backbone": 2})
    recompute = tuple({name: min(count, number) for name, count in held.items()} for held, number in zip(counts, again))
    unit = Unit("all", counts, pp=4 if schedule == "1f1b" else 2, recompute=recompute if any(again) else ())
    return Plan(given.model, given.cluster, (unit,), 32, 1, schedule)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("1f1b", "all: of [7, 4, 5, 2] layers by pipeline rank, [3, 0, 1, 0] are recomputed."),
        ("interleaved_1f1b", "all: of [12, 6] layers by pipeline rank, [4, 0] are recomputed."),
        ("zb_v", "all: of [9, 9] layers by pipeline rank, [3, 1] are recomputed."),
    ],
)
def test_recomputed_layers_are_told_by_pipeline_rank(schedule, words):
    assert list(recomputed_in_words(chain(schedule, (2, 0, 1, 0)))) == [words]


def test_that_nothing_is_recomputed_is_said():
    assert list(recomputed_in_words(chain("1f1b", (0, 0, 0, 0)))) == ["Nothing is recomputed."]


@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.slow), 120])
def test_no_figure_is_cut_off_or_broken(width):
    lines = printed(width).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in printed(width)
    for result in found().results:
        _, *others = figures(result)
        assert any(line.split()[-len(" ".join(others).split()) :] == " ".join(others).split() for line in lines)


def test_plans_that_read_alike_are_shown_once():
    result = found()
    twice = replace(result, results=[*result.results, result.results[-1]])
    assert distinct(twice) == distinct(result)
    assert len(set(map(figures, distinct(twice)))) == len(distinct(twice))
    measured = replace(twice, results=[replace(result.results[0], measured_s=1.0), *twice.results])
    assert distinct(measured) == [measured.results[0], *distinct(result)[1:]]
    alike = len(twice.results) - len(distinct(twice))
    words = f"{alike} more plan{'s' * (alike > 1)} with the degrees and the figures of one above."
    assert alike and words in remarks(twice)


def test_the_winner_is_told_with_its_ranks_and_its_gain():
    words = " ".join(winner_in_words(found()))
    assert "ranks 0 to" in words and "recomputed" in words and "A billion tokens take" in words
    assert "faster than" in words or "is as fast" in words


def test_beside_a_rival_that_is_as_fast_stands_one_that_is_not():
    best, *_ = found().results
    gains = (1.0, 1.01, 1.015, 1.5)
    named = zip("abcd", gains)
    results = [
        SimulatedCandidate(replace(best.candidate, strategy=name), Slower(best.prediction, gain))
        for name, gain in named
    ]
    words = winner_in_words(replace(found(), results=tuple(results), pins=Pins()))
    assert [word for word in words if word.startswith(("b (", "c (", "It is"))] == [
        f"b ({best.candidate.what}) is as fast, but for 1.0%.",
        f"It is 50% faster than d ({best.candidate.what}): while they compute, ranks reach "
        f"{_busy(results[0]):.0%} of their peak, there {_busy(results[3]):.0%}.",
    ]


def test_a_rival_that_is_faster_in_most_batches_is_told():
    best = found().best
    results = [
        SimulatedCandidate(replace(best.candidate, strategy=name), Slower(best.prediction, factor))
        for name, factor in (("a", 1.0), ("b", 0.9))
    ]
    assert (
        f"b ({best.candidate.what}) is slower in the batch that plans are ranked by, and 10.0% faster."
        in winner_in_words(replace(found(), results=tuple(results), pins=Pins()))
    )


class Slower:
    """A prediction whose step takes longer by a factor."""

    def __init__(self, prediction, factor: float) -> None:
        self.prediction, self.factor = prediction, factor

    def __getattr__(self, name: str):
        value = getattr(self.prediction, name)
        return value * self.factor if name == "step_s" else value


def _busy(result: SimulatedCandidate) -> float:
    own = result.prediction
    return own.hardware_flops / own.peak_flops / (own.step_s * (1 - own.bubbles.total_share))


@pytest.mark.parametrize("number", range(5))
def test_rows_are_called_by_the_ranks_of_the_units_whose_work_they_show(number):
    result = found().results[number]
    plan, timeline = result.candidate.plan, result.prediction.timeline
    assert len(timeline.rank_names) == timeline.num_ranks
    for row, name in enumerate(timeline.rank_names):
        first, *rest = map(int, name.split()[1].split("-"))
        unit = next(unit for unit in plan.units if 0 <= first - unit.first_rank < unit.num_ranks)
        assert (rest or [first])[0] - first + 1 == unit.tp * unit.cp
        modules = {timeline.module[place] for place in (timeline.rank == row).nonzero()[0]} - {""}
        assert any(set(unit.modules) & set(module.split("+")) for module in modules)
