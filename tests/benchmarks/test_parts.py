"""Models beside transformers: the tables of docs/models.md are of stored figures, and these are small."""

import json
import re

import pytest

from benchmark import BENCHMARKS, benchmark

with benchmark("parts") as parts, benchmark("rows") as rows, benchmark("whole_models") as whole_models:
    PARTS, WHOLE = parts.PARTS, [*whole_models.FAMILIES, *whole_models.GENERIC]


def stored_lines(name):
    """The lines of a table, by family, as benchmarks/against_transformers.py printed them."""
    stored = json.loads((BENCHMARKS / "results" / f"{name}-2-cpu-cores.json").read_text())["rows"]
    assert all(row["met"] for row in stored)
    figures = {}
    for row in stored:
        family, column = row["name"].split(": ")
        figures.setdefault(family, {})[column] = row["value"]
    return {family: rows.table_line(family, columns) for family, columns in figures.items()}


def documented(pattern):
    text = (BENCHMARKS.parent / "docs/models.md").read_text()
    return re.findall(pattern, text, re.MULTILINE)


def test_the_table_of_parts_is_what_is_stored():
    lines = stored_lines("parts")
    assert list(lines) == PARTS
    assert documented(r"^\| `\w+` \| \d+ \|.*\|$") == list(lines.values())


def test_the_tables_of_whole_models_are_what_is_stored():
    """They say what a model consists of in place of its targets, which are the second column stored."""
    lines = stored_lines("whole-models")
    assert list(lines) == WHOLE
    found = documented(r"^(\| `\w+` )(?!\| \d+ \|).*?((?:\| (?:\de-\d+|0) ){3}\|)$")
    assert sorted(name + figures for name, figures in found) == sorted(
        re.sub(r"\| \d+ ", "", line, count=1) for line in lines.values()
    )


@pytest.mark.parametrize(
    "part", ["clip", "qwen2_5_omni_audio", "mixtral", "resampler", "qformer", "internlm2", "eva_clip"]
)
def test_a_part_is_as_in_transformers_or_as_a_plain_computation(tmp_path, part):
    of = parts.distances(tmp_path, part)
    assert max(*of.exact, *of.parted) < 1e-8


def test_another_config_is_another_step(tmp_path):
    """What is compared is no model with itself: Motet reads the directory by its own code."""
    parts.write_part(tmp_path, "clip")
    with parts.InFloat64():
        theirs = parts.encoder_of_transformers(tmp_path, "clip")
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace('"layer_norm_eps": 1e-05', '"layer_norm_eps": 1e-03'))
        ours = parts.encoder_of_motet(tmp_path, "clip")
    assert min(ours.distance(theirs)) > 1e-6
