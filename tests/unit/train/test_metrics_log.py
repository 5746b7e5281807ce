"""A resumed run's metrics: every step once, a line that a crash cut short left out."""

import json

from motet.train.metrics_log import cut_metrics


def test_lines_after_the_step_and_broken_lines_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    cut_metrics(path, 3)
    assert path.read_text() == "\n".join(lines[:3]) + "\n"


def test_no_file_is_no_metrics(tmp_path):
    cut_metrics(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())
