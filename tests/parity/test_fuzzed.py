"""The fuzzer of Plans: stored cases are made again and equal one process; a failure is made small."""

import json

import pytest

from benchmark import BENCHMARKS, benchmark
from parity.drawn_plans import draw, drawn_at, obstacle_of, smaller
from parity.fuzzing import run_cases
from ranks import run_ranks

STORED = json.loads((BENCHMARKS / "results" / "fuzz_plans-2-cpu-cores.json").read_text())
NUM_REPLAYED = 3
"""Stored cases a number of ranks: evenly chosen ones."""


def stored(num_ranks):
    rows = [row for row in STORED["cases"] if row["ranks"] == num_ranks]
    return rows[:: max(1, len(rows) // NUM_REPLAYED)][:NUM_REPLAYED]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_stored_cases_equal_one_process(num_ranks):
    rows, cases = stored(num_ranks), []
    assert rows
    for row in rows:
        strategy, case = drawn_at(STORED["seed"], row["number"], row["attempt"])
        assert (strategy, case.schedule, case.num_ranks) == (row["strategy"], row["schedule"], num_ranks)
        assert obstacle_of(case) == ""
        cases.append(case)
    for found in run_ranks(run_cases, num_ranks, cases):
        assert [wrong for _, wrong in found] == [[]] * len(cases)


def test_no_stored_case_differs():
    assert STORED["cases"] and not any(row["differs"] for row in STORED["cases"])
    assert [row["number"] for row in STORED["cases"]] == list(range(len(STORED["cases"])))
    assert max(row["largest_error"] for row in STORED["cases"]) < 1e-10


def test_a_case_is_made_again_from_its_numbers():
    first, second = draw(3, 5), draw(3, 5)
    assert first == second
    assert (first.strategy, first.case) == drawn_at(3, 5, first.attempt)
    assert draw(3, 6).case != first.case


def test_a_failure_is_made_as_small_as_it_can_be(monkeypatch):
    """Here what fails is whatever has an image and three microbatches or more."""
    with benchmark("fuzz_plans") as fuzz:

        def fails(cases):
            return [
                fuzz.Outcome(1.0, ["off"] if "image" in case.contents and num_microbatches(case) >= 3 else [])
                for case in cases
            ]

        monkeypatch.setattr(fuzz, "outcomes", fails)
        case = next(case for case in (draw(0, number).case for number in range(99)) if fails([case])[0].wrong)
        small, steps = fuzz.shrunk(case)
        assert fails([small])[0].wrong
        assert (small.contents, num_microbatches(small), small.frozen) == (("image",), 3, ())
        assert fuzz.repeated(case, steps) == small
        assert not any(fails([one])[0].wrong for one in smaller(small))


def num_microbatches(case):
    backbone = next(unit for unit in case.units if "backbone" in unit.modules)
    return case.batch_size // (backbone.dp * case.microbatch_size)
