"""A report from the files of a run's folder alone: whole, readable offline, with nothing unescaped."""

import json
import re

import pytest
from PIL import Image

from motet.train.report.charts import WIDE, grouped_bars, horizontal_bars, line_chart
from motet.train.report.page import write_report

RATIOS = {"unit": "MFLOP", "max_over_bound": 1.0, "max_over_bound_before": 1.5}
PHASE = RATIOS | {"bound": 10, "loads": [10, 9], "loads_before": [15, 4]}
SUMMARY = {
    "steps": 3,
    "num_ranks": 2,
    "device": "cpu",
    "wall_s": 75.0,
    "tokens_per_s": 1234.5,
    "mfu": 0.25,
    "hfu": 0.31,
    "peak_source": "measured",
    "loss_steps": 1,
    "loss_first": 3.0,
    "loss_last": 1.0,
    "heldout_loss_by_step": {"3": 1.1},
    "exact_match": {"<task>": 0.5},
    "num_heldout": {"<task>": 2},
    "balance": {"methods": {"mixed": 1, "joint": 2}, "why": "joint: 3 ms predicted (per_phase 4 ms)."},
    "phases": {"backbone": RATIOS | {"num_replicas": 2}},
    "data_wait_share": 0.01,
    "core_wait_share": 0.25,
    "memory": {"peak_bytes": 2**30, "kind": "resident"},
    "bad_examples": 1,
    "bad_steps": 0,
}


def step(number):
    return {
        "step": number,
        "loss": 3.0 / number,
        "step_s": 0.1,
        "data_wait_s": 0.0,
        "decide_s": 0.0,
        "core_wait_s": 0.0,
        "actions": {"forward backbone": {"max_s": 0.1, "mean_s": 0.1}},
        "phases": {"backbone": PHASE},
    }


def test_a_report_is_self_contained_and_escapes_what_it_shows(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    answer = {"task": "<task>", "prompt": "<image> & what?", "answer": "<b>", "expected": "<b>", "is_exact": True}
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step(number)) + "\n" for number in (1, 2, 3)))
    media = [str(tmp_path / "image.png"), str(tmp_path / "gone.wav")]
    (tmp_path / "answers.json").write_text(json.dumps([answer | {"media": media}]))
    page = write_report(tmp_path).read_text()
    for shown in (
        "1 min 15 s",
        "&lt;image&gt; &amp; what?",
        "data:image/png;base64,",
        "gone.wav",
        "1.500",
        "MFLOP in step 2, the median",
        "50.0%",
        "joint 2, mixed 1 of 3 m",
    ):
        assert shown in page
    assert "<b>" not in page.split("Held-out examples")[1]
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_media_are_shown_by_what_they_are(tmp_path):
    names = ["scan.tif", "speech.flac", "clip.mkv", "points.ply", "image 1, held by the record"]
    for name in names:
        (tmp_path / name).write_bytes(b"bytes")
    answer = {"task": "all", "prompt": "?", "answer": "a", "expected": "a", "is_exact": True}
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(1)) + "\n")
    media = [str(tmp_path / name) for name in names]
    (tmp_path / "answers.json").write_text(json.dumps([answer | {"media": media}]))
    page = write_report(tmp_path).read_text()
    assert page.count('<img alt="scan.tif" src="data:image/tiff;') == page.count("<img") == 1
    assert '<audio controls preload="metadata" src="data:audio/' in page
    assert '<video controls preload="metadata" src="data:video/' in page
    assert all(f"<p>{name}</p>" in page for name in names[3:])


@pytest.mark.parametrize(
    ("num_steps", "num_bad", "said"),
    [(1, 0, "loss of its one step"), (2, 1, "loss of its one step"), (2, 0, "loss, first to last step")],
)
def test_one_loss_is_not_shown_twice(tmp_path, num_steps, num_bad, said):
    summary = SUMMARY | {"steps": num_steps, "bad_steps": num_bad, "bad_examples": 0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step(1 + i)) + "\n" for i in range(num_steps)))
    assert f"<span>{said}</span>" in write_report(tmp_path).read_text()


def y_ticks(low, high):
    """The numbers at the y axis of a chart of one line, which are right-aligned."""
    chart = line_chart({"line": [(0, low), (1, high)]}, x_label="x", y_label="y")
    return [float(text) for text in re.findall(r'class="tick"[^>]*text-anchor="end">([^<]+)<', chart)]


@pytest.mark.parametrize("largest", [9.0, 999_999.0, 1.25e6, 2.5e12])
def test_no_number_of_an_axis_reaches_its_label(largest):
    chart = grouped_bars({"before": [largest]}, ["rank 0"], y_label="kFLOP", rule=("bound", largest))
    label = float(re.search(r"translate\((\d+) ", chart)[1])
    numbers = re.findall(r'class="tick" x="([\d.]+)"[^>]*text-anchor="end">([^<]+)<', chart)
    assert min(float(right) - 7 * len(text) for right, text in numbers if text != "bound") > label


def test_a_loss_that_falls_little_is_seen_to_fall(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | {"heldout_loss_by_step": {}}))
    lines = [step(number) | {"loss": 6 - number / 10} for number in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chart = write_report(tmp_path).read_text().split("<h2>Loss</h2>")[1].split("</svg>")[0]
    heights = [float(y) for y in re.findall(r'<circle class="bar s0"[^>]*cy="([\d.]+)"', chart)]
    assert heights[-1] - heights[0] > 100


def test_ticks_are_round_and_cover_the_range():
    assert y_ticks(0, 4.7) == [0, 1, 2, 3, 4, 5]
    assert y_ticks(1, 1) == [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    for low, high in ((0.93, 1.02), (-3, 250), (0, 1e-12)):
        ticks = y_ticks(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high * (1 - 1e-9)
        assert 3 <= len(ticks) <= 8


def test_names_of_bars_have_room():
    """An action of a stage with parts of two modules has a name of 37 characters, about 7 wide each."""
    names = ["optimizer", "backward for the weights image+audio"]
    svg = horizontal_bars(dict.fromkeys(names, 1.0), unit="ms")
    ends = [float(x) for x in re.findall(r'class="name" x="([\d.]+)"', svg)]
    assert min(ends) > 6.5 * max(map(len, names))
    assert all(
        float(x) + float(width) <= WIDE for x, width in re.findall(r'rect .* x="([\d.]+)" .*?width="([\d.]+)"', svg)
    )
