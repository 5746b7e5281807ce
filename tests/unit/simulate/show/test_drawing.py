from itertools import combinations

import numpy as np
import pytest

from motet.core.timeline import Span, Timeline
from motet.schedule import data_parallel, one_f_one_b, zb_h1
from motet.simulate import StageTimes, bubbles, simulate, stage_times
from motet.simulate.engine.simulate import Prepared
from motet.simulate.show.drawing import BUBBLE, draw, mixed

HUES = ("backbone", "image", "audio", "video", "generator")
TO_DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
TO_PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]


def one_rank(*kinds_and_modules: tuple[str, str]) -> Timeline:
    return Timeline.of(
        Span(0, f"{place}", 0, place, place, place + 1.0, kind, module)
        for place, (kind, module) in enumerate(kinds_and_modules)
    )


def colours(timeline: Timeline) -> list[str]:
    drawing = draw(timeline, max_rows=9)
    return [drawing.paints[paint].colour for paint in drawing.paint.tolist()]


def channels(colour: str) -> np.ndarray:
    return np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])


def luminance(colour: str) -> float:
    return float(channels(colour) @ [0.299, 0.587, 0.114])


@pytest.mark.parametrize("module", HUES)
def test_lightness_tells_the_passes_of_a_module_apart(module):
    others = [("F", name) for name in HUES]
    shades = colours(one_rank(*others, *((kind, module) for kind in ("R", "F", "B", "W"))))[-4:]
    steps = -np.diff([luminance(shade) for shade in shades])
    assert (steps > 0.08).all(), "palest to darkest"


@pytest.mark.parametrize("seen", [np.eye(3), TO_DEUTERANOPIA, TO_PROTANOPIA], ids=["all", "deuteranopia", "protanopia"])
@pytest.mark.parametrize("kind", ["F", "B"])
def test_modules_are_told_apart_by_the_colour_blind_too(seen, kind):
    """Colour blindness as Machado et al. (2009) simulate it, on linear channels."""
    found = [(np.array(seen) @ channels(colour) ** 2.2).clip(0, 1) ** (1 / 2.2) for colour in colours(
        one_rank(*((kind, name) for name in HUES))
    )]  # fmt: skip
    assert min(float(np.abs(one - other).max()) for one, other in combinations(found, 2)) > 0.09


def test_the_backbone_looks_the_same_in_every_picture():
    with_encoders = colours(one_rank(("B", "image"), ("B", "backbone"), ("B", "generator")))
    assert with_encoders[1] == colours(one_rank(("B", "backbone")))[0]
    assert len(set(with_encoders)) == 3


def test_communication_is_in_the_band_and_has_no_hue_wherever_it_ran():
    spans = [
        Span(0, "0F0", 0, 0, 0.0, 1.0, "F", "image"),
        Span(0, "0EXCHANGE_F0>1", 0, 0, 1.0, 2.0, "EXCHANGE_F", "image"),
        Span(0, "0SEND_F0>1", 0, 0, 1.0, 2.0, "SEND_F", "image", "send"),
        Span(0, "0F0", 0, 0, 2.0, 3.0, "F", "image", "tensor"),
    ]
    drawing = draw(Timeline.of(spans), max_rows=9)
    assert [drawing.paints[paint].band for paint in drawing.paint.tolist()] == [False, True, True, True]
    for paint in drawing.paints[1:3]:
        assert np.ptp(channels(paint.colour)) < 0.1
    assert {"exchange between modules", "send and receive", "tensor-parallel communication"} <= {
        key.name for key in drawing.legend
    }


def test_shares_are_those_of_the_simulator():
    timeline = simulate(one_f_one_b(4, 8), stage_times([1.0, 2.0, 1.0, 1.0], [2.0] * 4, send_s=0.1))
    drawing = draw(timeline, max_rows=9)
    counted = bubbles(timeline)
    assert drawing.bubble_share == pytest.approx(1 - counted.busy_s / counted.step_s)
    assert f"{counted.total_share:.1%} bubbles" in drawing.facts


def test_every_span_is_a_box_of_its_rank():
    timeline = simulate(zb_h1(4, 8), stage_times([1.0] * 4, [2.0] * 4))
    drawing = draw(timeline, max_rows=9)
    assert sorted(drawing.span.tolist()) == list(range(len(timeline)))
    assert (drawing.ranks[drawing.row] == timeline.rank[drawing.span]).all()
    assert (drawing.start_s == timeline.start_s[drawing.span]).all()
    assert (np.diff(drawing.row) >= 0).all()
    same_row = np.diff(drawing.row) == 0
    assert (np.diff(drawing.start_s)[same_row] >= 0).all()


def test_the_legend_has_what_there_is_and_no_more():
    names = [
        key.name
        for key in draw(one_rank(("F", "image"), ("B", "image"), ("NORM", ""), ("STEP", "")), max_rows=9).legend
    ]
    assert names == ["image", "forward", "backward", "optimizer", "norm of the gradient", "bubble"]
    assert [key.name for key in draw(Timeline.of(), max_rows=9).legend] == ["bubble"]


def test_of_many_ranks_some_stand_for_all():
    busy = np.linspace(0.4, 0.6, 3072)
    busy[[700, 2001]] = 0.9, 0.1
    timeline = Timeline.of(
        [Span(rank, "F", 0, 0, 0.0, float(busy[rank]), "F", "backbone") for rank in range(3072)]
        + [Span(0, "F", 0, 0, 0.9, 1.0, "F", "backbone")]
    )
    drawing = draw(timeline, max_rows=96)
    assert {0, 700, 2001, 3071} <= set(drawing.ranks.tolist())
    assert len(drawing.ranks) <= 40
    assert f"{len(drawing.ranks)} of 3,072 rows" in drawing.facts
    assert set(drawing.row.tolist()) == set(range(len(drawing.ranks)))
    assert draw(timeline, max_rows=4096).ranks.tolist() == list(range(3072))


def test_ranks_that_do_the_same_at_the_same_times_are_one_row():
    longer = {2: 1.5, 5: 1.5, 4: 1.0}
    spans = [Span(rank, f"0F{part}", 0, part, part, part + longer.get(rank, 1.25) / 2, "F", "backbone")
             for rank in range(6) for part in range(2)]  # fmt: skip
    drawing = draw(Timeline.of(spans), max_rows=9)
    assert drawing.names == ("rank 0 x3", "rank 2 x2", "rank 4")
    assert drawing.ranks.tolist() == [0, 2, 4] and len(drawing.span) == 6
    assert "x2 stands for two" in drawing.facts
    # Of another module, or of another microbatch, they would not do the same.
    other = [*spans[:-1], Span(5, "0F1", 0, 3, 1, 1.75, "F", "backbone")]
    assert draw(Timeline.of(other), max_rows=9).names == ("rank 0 x3", "rank 2", "rank 4", "rank 5")
    other = [*spans[:-1], Span(5, "0F1", 0, 1, 1, 1.75, "F", "image")]
    assert draw(Timeline.of(other), max_rows=9).names == ("rank 0 x3", "rank 2", "rank 4", "rank 5")


def test_boxes_are_numbered_where_there_are_several_microbatches():
    assert not draw(one_rank(("F", "backbone")), max_rows=9).is_numbered
    assert draw(simulate(one_f_one_b(2, 2), stage_times([1.0] * 2, [1.0] * 2)), max_rows=9).is_numbered


@pytest.mark.parametrize(
    "kinds",
    [
        [("F", ""), ("B", ""), ("F", "image"), ("NEW", "image"), ("NEW", "")],
        [(kind, f"{name}") for name in range(9) for kind in ("R", "F", "B", "I", "W")],
        [("STEP", ""), ("GATHER", "image"), ("REDUCE", ""), ("NORM", ""), ("EXCHANGE_F", "image")],
    ],
)
def test_the_legend_explains_every_colour_that_is_drawn(kinds):
    drawing = draw(one_rank(*kinds), max_rows=9)
    explained = {colour for entry in drawing.legend for colour in entry.colours}
    assert {paint.colour for paint in drawing.paints} <= explained


def test_mixing():
    assert mixed("#804020", 0) == "#804020"
    assert mixed("#804020", 1) == "#ffffff" and mixed("#804020", -1) == "#000000"
    assert mixed("#800000", 0.5) == "#c08080"
    assert luminance(BUBBLE) > 0.85


def test_of_many_ranks_that_are_alike_the_same_are_drawn_as_of_any():
    """Ranks 0 to 3 take the same time, and each of the others its own."""
    made, seconds = data_parallel({"image": True, "backbone": True}, 12, 2), np.ones((3, 24, 1))
    seconds += np.maximum(np.arange(24) // 2 - 3, 0)[:, None] / 100
    times = StageTimes(*seconds)
    few, all_ = (draw(simulate(program, times), max_rows=9) for program in (made, Prepared(made, whole=True)))
    assert few.timeline.num_ranks < 12 and all_.timeline.num_ranks == 12
    assert (few.facts, few.names, few.ranks.tolist()) == (all_.facts, all_.names, all_.ranks.tolist())
    for name in ("row", "number", "start_s", "end_s", "bubble_share"):
        np.testing.assert_allclose(getattr(few, name), getattr(all_, name), atol=1e-12)
    actions = [[one.timeline.action[span] for span in one.span.tolist()] for one in (few, all_)]
    assert actions[0] == actions[1]
