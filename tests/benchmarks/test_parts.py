"""Parts beside transformers: each has its figures in docs/models.md, and they are figures."""

import re

import pytest

from benchmark import BENCHMARKS, benchmark

with benchmark("parts") as parts:
    PARTS = parts.PARTS


def test_each_part_has_its_row_in_the_table():
    text = (BENCHMARKS.parent / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \d+ \| (\S+) \| (\S+) \| (\S+) \| \S+ \|$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == PARTS
    assert max(float(figure) for _, *figures in rows for figure in figures) < 1e-8


@pytest.mark.parametrize("part", ["clip", "qwen2_5_omni_audio", "mixtral", "resampler", "qformer"])
def test_a_part_is_as_in_transformers(tmp_path, part):
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
