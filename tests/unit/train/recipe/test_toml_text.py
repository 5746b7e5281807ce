"""Lines of keys, values from a command line, and TOML that reads back as what was written."""

import re
import tomllib

import pytest

from motet.core.errors import UserError
from motet.train.recipe.toml_text import dump_toml, line_of_key, parse_value

TEXT = """\
# a recipe
[run]
dir = "x"
seed = 1
optimizer.lr = 3

[model.backbone]
config = { hidden_size = 64 }
"quoted.key" = 2

[[data.sources]]
path = "a"
[[data.sources]]
path = "b"
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("run", "seed"), 4),
        (("run",), 2),
        (("run", "optimizer", "lr"), 5),
        (("model", "backbone", "config", "hidden_size"), 8),
        (("model", "backbone", "quoted.key"), 9),
        (("model", "backbone", "missing"), 7),
        (("data", "sources", 1, "path"), 14),
        (("nowhere", "at all"), None),
    ],
)
def test_line_of_key(key, line):
    assert line_of_key(TEXT, key) == line


def test_an_empty_key_has_a_line():
    assert line_of_key('a = 1\n"" = 2\n', ("",)) == 2
    assert line_of_key("[a.'']\nb = 1\n", ("a", "", "b")) == 2


def test_values_from_the_command_line_are_toml_or_else_a_string():
    assert parse_value("1e-3") == 1e-3
    assert parse_value("[1, 2]") == [1, 2]
    assert parse_value("true") is True
    assert parse_value('"quoted"') == "quoted"
    assert parse_value("cosine") == "cosine"
    assert parse_value("../some/file.jsonl") == "../some/file.jsonl"
    assert parse_value("1\nother = 2") == "1\nother = 2"
    for stamp in ("2026-11-28T02:31:54", "2026-11-28T02:31:54Z", "2026-11-28", "07:32:00"):
        assert parse_value(stamp) == stamp


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 100_000, "1e999", "{a = " * 2000])
def test_values_that_cannot_be_read_are_refused(text):
    with pytest.raises(UserError, match=rf"^--set {re.escape(text[:5])}.*(digits|deep|too large)$"):
        parse_value(text)


def test_dumped_tables_read_back():
    tables = {
        "run": {"dir": '/a "quoted" path\\with\ttab', "steps": 3, "lr": 1e-05, "never": float("inf"), "on": True},
        "model": {"encoders": {"image": {"layers": [1, 2], "names": ["ä", "b"]}, "odd name": {"x": 1}}},
        "empty": {},
    }
    assert tomllib.loads(dump_toml(tables | {"run": tables["run"] | {"absent": None}})) == tables
