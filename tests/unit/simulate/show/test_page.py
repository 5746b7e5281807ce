import json
import re
from dataclasses import replace

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.timeline import Span, Timeline
from motet.schedule import one_f_one_b
from motet.simulate import simulate, stage_times
from motet.simulate.show.page import framed_page, write_timeline_html


def data_of(path) -> dict:
    """What the page's script reads, with the texts of actions as it shows them."""
    data = json.loads(re.search(r"const DATA = (.*);\n", path.read_text(encoding="utf-8"))[1])
    for row in data["rows"]:
        texts = zip(row["actions"], row["microbatches"])
        row["actions"] = [data["texts"][text].replace("\x01", str(number)) for text, number in texts]
    return data


@pytest.fixture
def page(tmp_path):
    return tmp_path / "t.html"


def test_the_page_has_every_span_where_it_was(page):
    timeline = simulate(one_f_one_b(4, 8), stage_times([1.0, 1.5, 1.0, 0.7], [2.0] * 4, send_s=0.1))
    write_timeline_html(timeline, page, title="1F1B")
    data = data_of(page)
    tick_s = data["makespan_s"] / data["ticks"]
    assert data["makespan_s"] == timeline.makespan_s
    found = {
        (row["name"], action, microbatch): (start * tick_s, duration * tick_s)
        for row in data["rows"]
        for action, microbatch, start, duration in zip(
            row["actions"], row["microbatches"], np.cumsum(row["gaps"]).tolist(), row["durations"]
        )
    }
    assert len(found) == len(timeline)
    for span in timeline:
        start_s, duration_s = found[f"rank {span.rank}", span.action, span.microbatch]
        assert start_s == pytest.approx(span.start_s, abs=tick_s)
        assert duration_s == pytest.approx(span.duration_s, abs=2 * tick_s)


def test_the_page_needs_no_network(page):
    write_timeline_html(simulate(one_f_one_b(2, 2), stage_times([1.0] * 2, [2.0] * 2)), page)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|fetch\(|XMLHttpRequest", text)


def test_ranks_are_called_by_those_that_they_stand_for(page):
    timeline = simulate(one_f_one_b(2, 2), stage_times([1.0] * 2, [2.0] * 2))
    write_timeline_html(replace(timeline, rank_names=["ranks 0-7", "rank 8"]), page)
    assert [row["name"] for row in data_of(page)["rows"]] == ["ranks 0-7", "rank 8"]


def test_pages_in_frames_have_one_scale_and_no_heading(page):
    for seconds in (1.0, 2.0):
        timeline = simulate(one_f_one_b(2, 2), stage_times([seconds] * 2, [seconds] * 2))
        page.write_text(framed_page(timeline, max_spans=1000, framed_s=40.0), encoding="utf-8")
        data = data_of(page)
        assert data["shown"] / data["ticks"] == pytest.approx(40.0 / timeline.makespan_s)
        assert "<h1>" not in page.read_text(encoding="utf-8")
    write_timeline_html(timeline, page)
    assert data_of(page)["shown"] == data_of(page)["ticks"]


def test_20_000_spans_take_less_than_a_megabyte(page):
    timeline = simulate(one_f_one_b(16, 215), stage_times([1.0] * 16, [2.1] * 16, send_s=0.013))
    assert 19_000 < len(timeline) < 21_000
    write_timeline_html(timeline, page)
    assert page.stat().st_size < 1_000_000


def test_of_a_million_spans_some_ranks_are_drawn(page):
    num_spans = 600_000
    columns = np.arange(num_spans)
    timeline = Timeline(
        (columns % 16).astype(np.int32), columns * 1.0, columns + 0.5, ["F"] * num_spans, ["F"] * num_spans,
        ["backbone"] * num_spans, ["compute"] * num_spans, np.zeros(num_spans, np.int32),
        np.zeros(num_spans, np.int32), 16,
    )  # fmt: skip
    write_timeline_html(timeline, page)
    assert len(data_of(page)["rows"]) < 6
    assert "of 16 rows" in page.read_text(encoding="utf-8")


def test_names_cannot_end_the_script(page):
    name = "</script><b>&"
    write_timeline_html(Timeline.of([Span(0, name, 0, 0, 0.0, 1.0, "F", name)]), page, title=name)
    text = page.read_text(encoding="utf-8")
    assert text.count("</script>") == 1 and "<b>" not in text.replace('"<\\/script><b>&"', "")
    assert data_of(page)["rows"][0]["actions"] == [name]


def test_nothing_is_a_page_too(page):
    write_timeline_html(Timeline.of(), page)
    assert data_of(page)["rows"] == []


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"the page cannot be written to .*none"):
        write_timeline_html(Timeline.of(), tmp_path / "none" / "t.html")
