"""benchmarks/papers.py keeps what is promised of numbers that others published."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmark import BENCHMARKS, benchmark


@pytest.fixture(scope="module")
def papers():
    with benchmark("papers") as module:
        yield module


@pytest.fixture(scope="module")
def rows(papers):
    return papers.rows()


def test_every_promised_tolerance_is_met(rows):
    assert [f"{row.source}, {row.what}: {row.difference:+.1%}" for row in rows if row.missed] == []


def test_nothing_that_is_promised_has_left_the_table(rows):
    """How many numbers of each table are promised, and how closely."""
    promised = Counter((row.source, row.promised) for row in rows if row.promised is not None)
    assert promised == {
        ("Cornstarch, Table 3", 0.10): 7,
        ("Cornstarch, Table 2", 0.05): 9,
        ("Optimus, Table 5", 0.01): 1,
        ("Optimus, Table 5", 0.03): 2,
        ("OmniBal, Table 9", 1): 1,
        ("OmniBal, Table 9", 0): 1,
    }


def test_a_row_that_finds_a_constant_alone_is_met_exactly_and_promises_nothing(rows):
    for row in rows:
        if row.fitted and not row.source.startswith("Cornstarch"):
            assert row.promised is None
            assert row.difference == 0


@pytest.mark.parametrize("off", [0.2, -0.2])
def test_a_miss_is_shown_and_exits_with_1(papers, rows, off, monkeypatch, capsys, tmp_path):
    promised = next(row for row in rows if row.promised is not None)
    wrong = replace(promised, predicted=promised.published * (1 + off))
    monkeypatch.setattr(papers, "rows", lambda: [promised, wrong])
    monkeypatch.setattr("sys.argv", ["papers.py", "--json", str(tmp_path / "papers.json")])
    with pytest.raises(SystemExit, match="1"):
        papers.main()
    assert "1 of 2 promised tolerances are met" in capsys.readouterr().out
    assert [row["missed"] for row in json.loads((tmp_path / "papers.json").read_text())["rows"]] == [False, True]


def test_the_stored_figures_are_those_that_the_program_gives(rows):
    stored = json.loads((BENCHMARKS / "results" / "papers.json").read_text())["rows"]
    assert stored == json.loads(json.dumps([row.record() for row in rows]))
