"""Rows of benchmarks: whether a goal is met, and the fields that are stored."""

import json

import pytest

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


@pytest.mark.parametrize(("value", "code", "said"), [(0.5, 0, "goal 1, met"), (1.5, 1, "goal 1, MISSED")])
def test_a_missed_goal_is_said_and_ends_with_exit_code_1(tmp_path, capsys, value, code, said):
    found = [Row("a", value, 1.0), Row("b", 3.0)]
    rows.show(found[0])
    assert said in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        rows.finish(found, tmp_path / "rows.json")
    assert end.value.code == code
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 2
