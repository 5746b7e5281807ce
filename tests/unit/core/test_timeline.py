import json

import pytest

from motet.core.timeline import Span, Timeline


@pytest.fixture
def timeline():
    return Timeline.of(
        [
            Span(0, "0F0", step=3, microbatch=0, start_s=1.0, end_s=1.5, kind="F", module="image"),
            Span(1, "2NORM", step=3, microbatch=0, start_s=1.5, end_s=1.75, kind="NORM"),
            Span(0, "0F1", step=3, microbatch=1, start_s=2.0, end_s=2.25, kind="F", module="image"),
        ]
    )


def test_seconds_are_summed_by_kind_and_module_in_order_of_appearance(timeline):
    assert list(timeline.seconds_by_kind().items()) == [(("F", "image"), 0.75), (("NORM", ""), 0.25)]


def test_chrome_trace_has_a_row_a_rank_in_microseconds(timeline, tmp_path):
    timeline.write_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(span["pid"], span["ts"], span["dur"]) for span in spans] == [
        (0, 1_000_000, 500_000),
        (1, 1_500_000, 250_000),
        (0, 2_000_000, 250_000),
    ]
    orders = [event["args"]["sort_index"] for event in trace["traceEvents"] if event["name"] == "process_sort_index"]
    assert orders == [0, 1]
    assert [span["cname"] for span in spans] == ["thread_state_runnable", "generic_work", "thread_state_runnable"]
    assert spans[2]["args"] == {"step": 3, "microbatch": 1, "module": "image"}
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"].endswith("_name")]
    assert names == ["rank 0", "compute", "rank 1", "compute"]


def test_json_has_an_object_a_span(timeline, tmp_path):
    timeline.write_json(tmp_path / "timeline.json")
    assert [Span(**fields) for fields in json.loads((tmp_path / "timeline.json").read_text())] == list(timeline)


def test_empty_timeline(tmp_path):
    Timeline.of().write_chrome_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
