import json
import time

import torch

from motet.runtime.clock import ActionClock


def test_spans_are_measured_in_order(tmp_path):
    clock = ActionClock(3, torch.device("cpu"))
    for action in ("forward image", "forward backbone"):
        with clock.span(action, 7, 1, kind="F", module=action.split()[1]):
            time.sleep(0.01)
    timeline = clock.take()
    first, second = timeline
    assert (first.rank, first.action, first.step, first.microbatch) == (3, "forward image", 7, 1)
    assert [(span.kind, span.module) for span in timeline] == [("F", "image"), ("F", "backbone")]
    assert 0 <= first.start_s < first.end_s <= second.start_s
    assert 0.01 <= first.duration_s < 1
    assert not len(clock.take())
    timeline.write_chrome_trace(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 5


def test_clocks_with_one_zero_share_their_time():
    zero_s = time.perf_counter() - 100
    clock = ActionClock(0, torch.device("cpu"), zero_s=zero_s)
    with clock.span("reduce", 0, 0, kind="REDUCE"):
        pass
    assert 100 <= next(iter(clock.take())).start_s < 200
