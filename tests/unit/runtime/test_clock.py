import json

import pytest
import torch

from motet.runtime.clock import ActionClock
from motet.schedule import Action, Kind


@pytest.fixture
def now_s(monkeypatch):
    """What the processor's clock says: the last of these seconds."""
    seconds = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: seconds[-1])
    return seconds


def test_spans_are_measured_in_order(tmp_path, now_s):
    clock = ActionClock(3, torch.device("cpu"))
    for stage, module in enumerate(("image", "backbone")):
        now_s.append(now_s[-1] + 1)
        clock.begin(Action(stage, Kind.F, 1))
        now_s.append(now_s[-1] + 2)
        clock.end(Action(stage, Kind.F, 1), 7, module)
    timeline = clock.take()
    first, _ = timeline
    assert (first.rank, first.action, first.step, first.microbatch) == (3, "0F1", 7, 1)
    assert [(span.kind, span.module) for span in timeline] == [("F", "image"), ("F", "backbone")]
    assert [(span.start_s, span.end_s) for span in timeline] == [(1, 3), (4, 6)]
    assert not len(clock.take())
    timeline.write_chrome_trace(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 5


def test_clocks_with_one_zero_share_their_time(now_s):
    clock = ActionClock(0, torch.device("cpu"), zero_s=900)
    clock.begin(Action(0, Kind.NORM))
    now_s.append(1001)
    clock.end(Action(0, Kind.NORM), 0, "backbone")
    assert [(span.start_s, span.end_s, span.module) for span in clock.take()] == [(100, 101, "")]
