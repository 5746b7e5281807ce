"""A resumed run's metrics: every step once, a line that a crash cut short left out, another's file left alone."""

import json
import resource

import pytest

from motet.core.errors import UserError
from motet.train.report.step_lines import METRICS, Lines, cut_lines, forget_aside, go_on_behind, to_json

KEYS = frozenset(("step", "loss"))


def test_lines_after_the_step_and_a_broken_last_line_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    cut_lines(path, 3, KEYS)
    assert path.read_text() == "\n".join(lines[:3]) + "\n"


def test_no_file_is_no_metrics(tmp_path):
    cut_lines(tmp_path / "metrics.jsonl", 3, KEYS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line", ["[1]", '{"step": 1}', '{"step": "1", "loss": 2}', "epoch,loss", "\xff", "null", "", "[" * 100_000]
)
def test_another_programs_file_is_refused_and_stays(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    text = json.dumps({"step": 1, "loss": 1.0}).encode() + b"\n" + line.encode("latin-1") + b"\n"
    path.write_bytes(text)
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2, is no step of a run"):
        cut_lines(path, 0, KEYS)
    assert path.read_bytes() == text


def test_what_is_not_finite_is_null_in_json():
    assert (
        to_json({"a": [1.5, float("nan")], "b": (float("inf"), None, "NaN")})
        == '{"a": [1.5, null], "b": [null, null, "NaN"]}'
    )


def test_a_line_that_cannot_be_written_leaves_nothing_and_comes_with_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    lines.write("one")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, former[1]))
    try:
        with pytest.raises(OSError):
            lines.write("two")
        assert path.read_text() == "one\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    lines.write("three")
    lines.close()
    assert path.read_text() == "one\ntwo\nthree\n"


def test_what_is_cut_off_is_kept_until_the_run_goes_elsewhere(tmp_path):
    def log(loss, *steps):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.writelines(to_json(dict.fromkeys(METRICS, 0) | {"step": step, "loss": loss}) + "\n" for step in steps)

    def logged():
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["loss"]) for line in lines]

    old = [(step, 1) for step in range(1, 9)]
    log(1, *range(1, 9))
    go_on_behind(tmp_path, 4)
    assert logged() == old[:4]
    log(2, 5, 6)
    go_on_behind(tmp_path, 2)  # No checkpoint came of these two.
    assert logged() == old[:2]
    log(2, 3)
    go_on_behind(tmp_path, 8)
    assert logged() == old
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    go_on_behind(tmp_path, 4)
    log(2, 5, 6)
    forget_aside(tmp_path)
    go_on_behind(tmp_path, 6)
    assert logged() == [*old[:4], (5, 2), (6, 2)]
