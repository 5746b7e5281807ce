from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from motet.core.errors import UserError
from motet.core.timeline import Span, Timeline
from motet.schedule import one_f_one_b
from motet.simulate import simulate, stage_times
from motet.simulate.show.drawing import BUBBLE, draw
from motet.simulate.show.picture import write_png


def pixels(timeline, path, **options):
    write_png(timeline, path, **options)
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def count(found, colour: str) -> int:
    wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return int((found == wanted).all(axis=-1).sum())


def test_areas_are_seconds(tmp_path):
    """One rank: a second of forward, two of backward, one idle."""
    spans = [
        Span(0, "0F0", 0, -1, 0.0, 1.0, "F", "backbone"),
        Span(0, "0B0", 0, -1, 1.0, 3.0, "B", "backbone"),
        Span(0, "step", 0, -1, 3.99, 4.0, "STEP"),
    ]
    timeline = Timeline.of(spans)
    found = pixels(timeline, tmp_path / "t.png")
    forward, backward, *_ = (paint.colour for paint in draw(timeline, max_rows=9).paints)
    assert count(found, backward) / count(found, forward) == pytest.approx(2, rel=0.05)
    assert count(found, BUBBLE) > count(found, forward)


@pytest.mark.parametrize("num_ranks", [1, 4, 8, 64])
def test_readable_at_every_size(num_ranks, tmp_path):
    times = stage_times([1.0] * num_ranks, [2.0] * num_ranks, send_s=0.02)
    timeline = simulate(one_f_one_b(num_ranks, 8), times)
    found = pixels(timeline, tmp_path / "t.png", title="1F1B")
    height, width, _ = found.shape
    assert width == 2240 and height < 2000
    assert height / num_ranks > 20, "pixels a row"
    backward = next(paint.colour for paint in draw(timeline, max_rows=64).paints if not paint.band)
    assert count(found, backward) > 0.02 * found.shape[0] * found.shape[1] / num_ranks


def test_of_3072_ranks_some_are_drawn(tmp_path):
    timeline = Timeline.of(Span(rank, "F", 0, 0, 0.0, 1.0 + rank % 7, "F", "backbone") for rank in range(3072))
    assert pixels(timeline, tmp_path / "t.png").shape[0] < 1500


def test_boxes_narrower_than_a_pixel_are_not_lost(tmp_path):
    """A rank that is busy without a break, in 20,000 spans, looks as one that is busy in one."""
    num_spans = 20_000
    timeline = Timeline.of(Span(0, "F", 0, place, place, place + 1.0, "F", "backbone") for place in range(num_spans))
    whole = Timeline.of([Span(0, "F", 0, -1, 0.0, float(num_spans), "F", "backbone")])
    fine, coarse = (pixels(each, tmp_path / "t.png").astype(float) for each in (timeline, whole))
    assert np.abs(fine - coarse).mean() < 3


def test_pixels_shared_by_spans_and_bubbles_are_the_mean_of_both(tmp_path):
    """Ten spans a pixel, with gaps three times as long: no span is seen, its share is."""
    spans = [Span(0, "F", 0, place, place, place + 0.25, "F", "backbone") for place in range(20_000)]
    timeline = Timeline.of([*spans, Span(0, "F", 0, 0, 19_999.9, 20_000.0, "F", "backbone")])
    forward = [int(draw(timeline, max_rows=9).paints[0].colour[place : place + 2], 16) for place in (1, 3, 5)]
    bubble = [int(BUBBLE[place : place + 2], 16) for place in (1, 3, 5)]
    found = pixels(timeline, tmp_path / "t.png")
    middle = found[found.shape[0] // 2, 400:1800].astype(float)
    assert middle.mean(axis=0) == pytest.approx(0.25 * np.array(forward) + 0.75 * np.array(bubble), abs=1)


@pytest.mark.parametrize("num_layers", [1, 500])
def test_a_pass_has_the_number_of_its_microbatch_once_however_many_spans_it_has(num_layers, tmp_path):
    """Three passes of a second; what is drawn where spans have microbatches, and not where they have none."""

    def drawn(*microbatches):
        layers = np.linspace(0, 1, num_layers + 1)
        return pixels(
            Timeline.of(
                Span(0, f"0F{pass_}", 0, microbatch, pass_ + start, pass_ + end, "F", "backbone")
                for pass_, microbatch in enumerate(microbatches)
                for start, end in pairwise(layers.tolist())
            ),
            tmp_path / "t.png",
        )

    differs = (drawn(0, 1, 2) != drawn(-1, -1, -1)).any(axis=(0, 2))
    columns = np.flatnonzero(differs)
    numbers = np.split(columns, np.flatnonzero(np.diff(columns) > 50) + 1)
    left, breadth = 184, 2240 - 184 - 120
    assert [number.mean() for number in numbers] == pytest.approx(
        [left + (i + 0.5) * breadth / 3 for i in range(3)], abs=5
    )
    assert all(np.ptp(number) < 20 for number in numbers)


def test_a_pass_whose_layers_take_no_time_has_no_number(tmp_path):
    """A rank without items waits in each layer for the others' collectives."""

    def drawn(microbatch):
        layers = np.linspace(0.4, 0.44, 30).tolist()
        waits = [Span(0, "0F1", 0, microbatch, start, start + 1e-5, "F", "image") for start in layers]
        passes = [Span(0, f"1F{n}", 1, n, n / 2, n / 2 + 0.4, "F", "backbone") for n in range(2)]
        return pixels(Timeline.of([*waits, *passes]), tmp_path / "t.png")

    assert (drawn(1) == drawn(-1)).all()


def test_nothing_and_long_names_are_drawn(tmp_path):
    write_png(Timeline.of(), tmp_path / "nothing.png")
    names = [f"a_module_with_a_very_long_name_{number}" for number in range(9)]
    spans = [Span(0, "F", 0, 0, place, place + 1.0, "F", name) for place, name in enumerate(names)]
    short = pixels(Timeline.of(spans[:1]), tmp_path / "t.png").shape
    long = pixels(Timeline.of(spans), tmp_path / "t.png").shape
    assert long[1] == short[1] and long[0] > short[0], "the legend takes another line"


def test_the_same_timeline_gives_the_same_file(tmp_path):
    timeline = simulate(one_f_one_b(2, 3), stage_times([1.0] * 2, [2.0] * 2))
    for name in ("a.png", "b.png"):
        write_png(timeline, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"the picture cannot be written to .*none"):
        write_png(Timeline.of(), tmp_path / "none" / "t.png")
