"""Rows of benchmarks: whether a goal is met, and the fields that are stored."""

import json

from benchmark import benchmark

with benchmark("rows") as rows:
    Row = rows.Row


def test_a_value_is_to_be_no_more_than_its_goal_where_nothing_else_is_said():
    assert Row("a", 1.0, 1.0).met
    assert Row("a", 2.0).met
    assert not Row("a", 1.1, 1.0).met
    assert not Row("a share", 0.9, 1.0, met=False).met


def test_what_is_stored(tmp_path):
    rows.write_rows(tmp_path / "rows.json", [Row("a", 2.0, 1.0), Row("b", 3.0)], seed=7)
    assert json.loads((tmp_path / "rows.json").read_text()) == {
        "commit": rows.commit_of(),
        "device": "cpu",
        "emulated": False,
        "seed": 7,
        "rows": [
            {"name": "a", "value": 2.0, "goal": 1.0, "met": False},
            {"name": "b", "value": 3.0, "goal": None, "met": True},
        ],
    }
