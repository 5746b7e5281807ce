"""The fuzzer of Plans: stored cases are made again and equal one process; a failure is made small."""

import json
from dataclasses import replace

import pytest

from benchmark import BENCHMARKS, benchmark
from motet.core.plan import Unit
from parity.drawn_plans import (
    CELLS,
    CUT_EVERY,
    CUT_ITEMS,
    FIRST_CUT,
    PER_MIXTURE,
    WHOLE_MODULES,
    draw,
    obstacle_of,
    smaller,
)  # fmt: skip
from parity.fuzzing import run_cases
from parity.planned import LOOSEST, MIXED_LOOSEST, MIXED_TOLERANCE, TOLERANCE, PlannedCase, expected
from parity.towers import READ, TOWERS, WIDE
from ranks import run_ranks

STORED = json.loads((BENCHMARKS / "results" / "fuzz_plans-2-cpu-cores.json").read_text())
NUM_REPLAYED = 2
"""Stored cases a number of ranks."""
CHAIN = PlannedCase((Unit("all", ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2}), pp=2, zero=0),))
DATA_PARALLEL = (Unit("all", ({"image": 3, "audio": 2, "backbone": 3},), dp=2, zero=3),)
ABSENT_AT_FIRST = replace(CHAIN, batch_size=1, contents=("audio",), seed=30)
"""Audio in the second step and the third."""


def stored(num_ranks):
    """Cases from all over the stored ones."""
    numbers = range(0, STORED["num_cases"], max(1, STORED["num_cases"] // 60))
    drawn = (draw(STORED["seed"], number).case for number in numbers)
    return [case for case in drawn if case.num_ranks == num_ranks][:NUM_REPLAYED]


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
        4,
        pytest.param(5, marks=pytest.mark.slow),
    ],
)
def test_stored_cases_equal_one_process(num_ranks):
    cases = stored(num_ranks)
    assert cases
    for found in run_ranks(run_cases, num_ranks, cases):
        assert [each.wrong for each in found] == [[]] * len(cases)


def test_no_stored_case_differs():
    assert STORED["failures"] == []
    assert sum(sum(counts.values()) for counts in STORED["cells"].values()) == STORED["num_cases"] > 0
    assert all(row["error"] < row["tolerance"] for row in STORED["largest"])
    tolerances = [row["tolerance"] for row in STORED["amplified"]]
    assert all(TOLERANCE < each <= LOOSEST or MIXED_TOLERANCE < each <= MIXED_LOOSEST for each in tolerances)
    assert len(STORED["amplified"]) < STORED["num_cases"] / 50
    assert len(set(STORED["replays"][-1]["numbers"])) >= 200


def test_stored_runs_have_every_case_once():
    runs = STORED["runs"]
    assert [run["first"] for run in runs] == [sum(run["num_cases"] for run in runs[:n]) for n in range(len(runs))]
    assert sum(run["num_cases"] for run in runs) == STORED["num_cases"] and all(run["commit"] for run in runs)


def test_cases_add_up_over_commits(tmp_path):
    file, drawn = tmp_path / "cases.json", [draw(0, number) for number in range(3)]
    with benchmark("fuzz_plans") as fuzz:

        def run(commit, cases, *wrong):
            record = fuzz.Record.read(file, 0)
            record.begin(commit)
            record.add(cases, [fuzz.Outcome(1e-15, list(wrong)) for _ in cases])
            record.write(file)
            return record

        run("a", drawn[:1], "off")
        run("a", drawn[1:2])
        last = run("b", drawn[2:])
        stored = json.loads(file.read_text())
        assert [(each["commit"], each["first"], each["num_cases"]) for each in stored["runs"]] == [
            ("a", 0, 2),
            ("b", 2, 1),
        ]
        assert stored["num_cases"] == 3 == sum(sum(counts.values()) for counts in stored["cells"].values())
        assert [failure["number"] for failure in stored["failures"]] == [0] and last.failures_here() == []
        last.replace(replace(drawn[0], case=CHAIN), fuzz.Outcome(2e-10, [], tolerance=1e-9))
        assert last.failures == [] and last.amplified == [{"number": 0, "error": 2e-10, "tolerance": 1e-9}]
        assert last.largest[0] == last.amplified[0] and last.num_cases == len(last.largest) == 3
        with pytest.raises(SystemExit, match="is of seed 0: name another file"):
            fuzz.Record.read(file, 1)


def test_windows_take_a_minute_and_end_in_time():
    with benchmark("fuzz_plans") as fuzz:
        assert fuzz.window_size(0.0, 300.0, 0, 0) == fuzz.window_size(9.0, 291.0, 0, 16) == fuzz.FEWEST
        assert fuzz.window_size(50.0, 1000.0, 100, 120) == fuzz.WINDOW_S / 0.5
        assert fuzz.window_size(10.0, 1000.0, 100, 120) == fuzz.MOST
        assert fuzz.window_size(600.0, 1e4, 100, 120) == fuzz.FEWEST
        assert fuzz.window_size(250.0, 50.0, 100, 120) == 0, "20 cases that have begun take them"
        assert fuzz.window_size(250.0, 100.0, 100, 120) == 20, "40 end in time, 20 of which have begun"
        assert fuzz.window_size(300.0, 0.0, 0, 0) == 0


def test_results_are_stored_window_by_window_until_enough():
    """No window begins before results of the one before the last are there."""
    with benchmark("fuzz_plans") as fuzz, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "outcomes", lambda cases: [fuzz.Outcome(0.0, []) for _ in cases])
        asked = []

        def size(num_begun):
            asked.append(num_begun)
            return 3

        stored = []
        for drawn, found in fuzz._run(fuzz._windows(0, 5, 13, size), 2):
            stored.append([each.number for each in drawn])
            assert len(found) == len(drawn) and len(asked) <= len(stored) + 2
    assert stored == [[5, 6, 7], [8, 9, 10], [11, 12]]


def test_stored_cases_have_every_strategy_and_schedule_equally_often():
    cells = STORED["cells"].items()
    counts = [num for strategy, row in cells for num in row.values() if strategy not in (CUT_ITEMS, WHOLE_MODULES)]
    assert max(counts) - min(counts) <= 3, "every tenth number is one of cut items, another one of whole modules"


def test_a_case_is_made_again_from_its_number():
    assert draw(3, 5) == draw(3, 5)
    assert draw(3, 6).case != draw(3, 5).case


@pytest.mark.slow
def test_cases_have_all_that_a_plan_can_say():
    with benchmark("fuzz_plans") as fuzz:
        # There are many towers whose items can be cut.
        drawn = [draw(4, number) for number in (*range(370), *range(370 + FIRST_CUT, 3000, CUT_EVERY))]
        seen = {word for each in drawn for word in fuzz.features(each.case)}
    assert {(each.strategy, each.case.schedule) for each in drawn} == {
        *CELLS,
        (CUT_ITEMS, "data_parallel"),
        (WHOLE_MODULES, "data_parallel"),
    }
    assert seen >= {
        *(f"{num} ranks" for num in (2, 3, 4, 5)),
        *(f"zero {stage}" for stage in range(4)),
        *(f"balance {way}" for way in ("off", "joint", "per_phase", "auto")),
        *(f"example_order {order}" for order in ("given", "intra", "inter", "both")),
        *("tied", "frozen", "caps", "blocking", "deferred_warmup", "left_out", "is_mixed", "dropout", "has_large"),
        *(
            "recompute",
            "shard_size 2",
            "absent modality",
            "two blocks or more in a stage",
            "goes on under another Plan",
            "nodes unlike",
        ),
        *(
            "part queries",
            "part tiles",
            "part rows",
            "part sum",
            "part stacked",
            "part tiled",
            "part keys",
            "random fills, static",
            "fills of halves of blocks",
        ),
        *("cp 2 of llm", "cp 3 of llm", "cp 2 of encoders"),
        *(f"exchange {way}" for way in ("auto", "group_cast", "all_gather", "ulysses")),
        "2 groups of heads",
        *(f"cut items, {tower} tower" for tower in ("toy", *TOWERS, *READ, *WIDE)),
        *(f"cut items, {what}" for what in ("method", "idle", "dropout", "enters_again", "merges", "qwen3_moe")),
        # Pairs that do not divide each other are too rare for so few draws: `test_pairs.py` has them.
        *("dp 2 beside 1", "dp 1 beside 2", "dp 3 beside 1", "dp 1 beside 3"),
    }
    assert not any(obstacle_of(each.case) for each in drawn[:20])


def test_cases_that_follow_each_other_have_one_reference():
    """But for those with long sequences, which have one of their own."""
    drawn = [case for number in range(PER_MIXTURE) if isinstance(case := draw(0, number).case, PlannedCase)]
    first, *others = (case for case in drawn if not case.has_long)
    assert len({str(case.units) for case in others}) > PER_MIXTURE / 2
    figures = expected(first)
    assert all(expected(case) is figures for case in others)


ALONE_DRAWN = [
    replace(CHAIN, is_mixed=True),
    replace(CHAIN, left_out=0.3, batch_size=8),
    replace(CHAIN, frozen=("backbone block", "audio block")),
    replace(CHAIN, contents=("audio",), then=PlannedCase(DATA_PARALLEL, "gpipe", contents=("audio",))),
    replace(ABSENT_AT_FIRST, then=replace(ABSENT_AT_FIRST, schedule="gpipe")),
]
"""Mixed precision, examples left out, a frozen block, a run that goes on in one stage, and without what it has not."""


@pytest.mark.slow
def test_what_the_fuzzer_alone_draws_equals_one_process():
    """Each is a way to run a case that no other test has."""
    for found in run_ranks(run_cases, 2, ALONE_DRAWN):
        assert [each.wrong for each in found] == [[]] * len(ALONE_DRAWN)


def test_a_failure_is_made_as_small_as_it_can_be(monkeypatch):
    """Here what fails is whatever has an image and three microbatches or more."""
    with benchmark("fuzz_plans") as fuzz:

        def fails(cases):
            return [
                fuzz.Outcome(1.0, ["off"] if "image" in case.contents and num_microbatches(case) >= 3 else [])
                for case in cases
            ]

        monkeypatch.setattr(fuzz, "outcomes", fails)
        drawn = (draw(0, number).case for number in range(99))
        case = next(case for case in drawn if isinstance(case, PlannedCase) and fails([case])[0].wrong)
        small, steps = fuzz.shrunk(case)
        assert fails([small])[0].wrong
        assert (small.contents, num_microbatches(small), small.frozen) == (("image",), 3, ())
        assert fuzz.repeated(case, steps) == small
        assert not any(fails([one])[0].wrong for one in smaller(small))


def num_microbatches(case):
    backbone = next(unit for unit in case.units if "backbone" in unit.modules)
    return case.batch_size // (backbone.dp * case.microbatch_size)
