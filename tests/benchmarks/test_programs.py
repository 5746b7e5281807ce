"""Every program of benchmarks/ starts; order.py runs on a table of lengths, step_time.py on any mixture."""

import csv
import gzip
import json

import numpy as np
import pytest

from benchmark import BENCHMARKS, benchmark
from motet.models.build import build_mllm

# Not peers.py, which balance.py starts, and which answers lines of JSON.
PROGRAMS = sorted({path.stem for path in BENCHMARKS.glob("*.py") if "def main()" in path.read_text()} - {"peers"})


def test_there_are_programs():
    assert {"balance", "order", "step_time"} < set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_does(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with benchmark(name) as module, pytest.raises(SystemExit, match="0"):
        module.main()
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {name}.py") and module.__doc__.splitlines()[0] in said
    assert "--seed" in said and "--json" in said


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """A table of examples of every kind that the cases of order.py draw from."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("lengths") / "lengths.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        table = csv.DictWriter(
            file,
            (
                "task",
                "source",
                "image_width",
                "image_height",
                "num_images",
                "image_tokens",
                "audio_seconds",
                "text_tokens",
            ),
        )
        table.writeheader()
        for text, tiles, side in rng.integers((10, 1, 200), (500, 7, 1000), (100, 3)).tolist():
            about = {"task": "image_qa", "source": "internvl_any", "text_tokens": text}
            table.writerow(about | {"num_images": tiles, "image_tokens": 256 * tiles})
            table.writerow(
                {"task": "caption", "source": "b", "image_width": side, "image_height": side, "text_tokens": 9}
            )
            table.writerow(
                {"task": "image_chat", "source": "c", "num_images": 1, "image_tokens": text, "text_tokens": text}
            )
            table.writerow({"task": "text", "source": "d", "text_tokens": text})
            table.writerow({"task": "speech", "source": "e", "audio_seconds": tiles, "text_tokens": text})
    return path


def test_the_stored_gains_of_order_are_of_the_cases_that_there_are(lengths):
    with benchmark("order") as order:
        cases = list(order.cases(lengths))
    stored = json.loads((BENCHMARKS / "results" / "order.json").read_text())["cases"]
    assert [case.name for case in cases] == [case["case"] for case in stored]


def test_order_shows_gains_over_examples_as_they_come(lengths, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["order.py", "--lengths", str(lengths), "--json", str(tmp_path / "order.json")])
    with benchmark("order") as order:
        first = next(order.cases(lengths))
        monkeypatch.setattr(order, "cases", lambda path, seed: [first])
        with pytest.raises(SystemExit, match="0"):
            order.main()
    ((case,),) = [json.loads((tmp_path / "order.json").read_text())["cases"]]
    assert case["case"] == first.name and case["case"].split(",")[0] in capsys.readouterr().out
    assert set(case["ways"]) >= {"given", "given, padded", "intra", "inter", "both"}
    assert case["ways"]["given"]["given / this"] == [1, 1, 1]
    assert all(way["step_s"] > 0 for way in case["ways"].values())


def test_a_batch_of_step_time_may_lack_a_modality():
    with benchmark("step_time") as step_time:
        model = build_mllm(step_time.MODEL, step_time.VOCABULARY)
        batch = step_time.Batch([step_time.Row(9), step_time.Row(7, (), 0.1)], model, 1, 1, {})
    assert [items.num_items for items in batch.lengths.items.values()] == [0, 1]


def test_the_interval_of_a_median_lies_between_sorted_ratios():
    """Of 15 independent ratios, fewer than 4 are on one side of the median with a probability of 1.8 %."""
    with benchmark("executor") as executor:
        assert executor.interval([*range(14, -1, -1)]) == (3, 11)
        assert executor.interval(range(6)) == (0, 5)
        assert executor.interval(range(16)) == (3, 12)
