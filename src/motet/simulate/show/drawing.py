"""The drawing of a Timeline, which becomes a PNG (picture.py) or a page (page.py).

- A row is a rank, or ranks that do the same at the same times: compute above, communication in a thin band below. Free
  background is bubble.
- The hue of a box is its module. The colour-blind can distinguish hues (Okabe and Ito, 2008). Communication is grey.
- The lightness of a box is its kind, from light to dark: recomputation, forward, backward, backward for the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.timeline import COMPUTE_STREAM, Timeline
from motet.core.words import shown_seconds
from motet.core.workload import BACKBONE
from motet.schedule.program import COMPUTE_KINDS, Kind
from motet.simulate.bubbles import bubble_shares, bubbles
from motet.simulate.engine.alike import AlikeTimeline
from motet.simulate.engine.spans import Labels

BUBBLE = "#e8eaed"
INK = "#1c1e21"
SOFT = "#6a7078"
_BACKBONE_HUE = "#0072b2"
_HUES = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#8c6d31", "#7b61c9")
_NOBODYS_HUE = "#8a9099"
# Share of white (above 0) or of black (below 0) that is mixed into the hue.
_SHADES = {Kind.R: 0.78, Kind.F: 0.42, Kind.B: 0.0, Kind.I: 0.0, Kind.W: -0.38}
_SHADE_NAMES = {
    Kind.R: "recomputation",
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward, for the input",
    Kind.W: "backward, for the weights",
}
_OPTIMIZER = "#3d434b"
_COMMUNICATION = {
    "SEND": ("send and receive", "#b6bcc4"),
    "RECV": ("send and receive", "#b6bcc4"),
    "GATHER": ("gather of parameters", "#868e99"),
    "REDUCE": ("reduction of gradients", "#59616b"),
    "NORM": ("norm of the gradient", "#4b5f5a"),
    "EXCHANGE": ("exchange between modules", "#1f2328"),
}
_TENSOR_COMMUNICATION = ("tensor-parallel communication", "#a08d84")
_OTHER_COMMUNICATION = ("other communication", "#b6bcc4")


_MAX_HUES = 5
"""Most hues that the legend shows of one shade."""

SpanStyle = tuple[str, str, str]
"""(kind, module, stream) of a span. Spans with the same three are drawn alike."""


class Paint(NamedTuple):
    """How a span of a module is drawn. band: in the thin band of communication, not among compute."""

    colour: str
    band: bool
    module: str


class LegendEntry(NamedTuple):
    """An entry of the legend: a name, and the colours that it explains."""

    name: str
    colours: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Drawing:
    """Boxes in rows.

    ranks:          int64 [num_rows], the ranks that are drawn, ascending. names: their names, and how many do the same.
    bubble_share:   float64 [num_rows], share of the makespan that is bubble.
    row, paint:     int64 [num_boxes], index of the box's row, and of its colour in `paints`.
    start_s, end_s: float64 [num_boxes], from the first start of the Timeline.
    number:         int64 [num_boxes], the microbatch, or -1. is_numbered: whether there are several, which numbers
                    tell apart.
    span:           int64 [num_boxes], index of the span in `timeline`.
    facts:          a sentence: makespan, bubbles over all ranks, and, if only some ranks are drawn, which.
    timeline:       what is drawn; of ranks that are alike, where they are many, the Timeline of those that are drawn.
    """

    ranks: Int64Array
    names: tuple[str, ...]
    bubble_share: Float64Array
    row: Int64Array
    paint: Int64Array
    start_s: Float64Array
    end_s: Float64Array
    number: Int64Array
    is_numbered: bool
    span: Int64Array
    paints: tuple[Paint, ...]
    legend: tuple[LegendEntry, ...]
    makespan_s: float
    facts: str
    timeline: Timeline


def draw(timeline: Timeline, *, max_rows: int) -> Drawing:
    """The drawing of a Timeline. Of more than `max_rows` ranks that differ only some are drawn. O(spans)."""
    if isinstance(timeline, AlikeTimeline) and timeline.num_ranks > max_rows:
        return _drawn_in_part(timeline, max_rows)
    styles, paint = _styles(timeline)
    hues = _hues([module for kind, module, stream in styles if _computes(kind, stream)])
    idle = bubbles(timeline)
    bubble_share = idle.idle_s.sum(axis=1) / (idle.step_s or 1.0)
    leader = _alike(timeline, paint)
    leaders, num_alike = np.unique(leader, return_counts=True)
    chosen = _chosen(bubble_share[leaders], max_rows)
    ranks = leaders[chosen]
    drawn = np.flatnonzero(np.isin(timeline.rank, ranks))
    start_s = timeline.start_s - timeline.start_s.min(initial=np.inf)
    drawn = drawn[np.lexsort((start_s[drawn], timeline.rank[drawn]))]
    return Drawing(
        ranks=ranks,
        names=tuple(map(_row_name, map(timeline.rank_name, ranks.tolist()), num_alike[chosen].tolist())),
        bubble_share=bubble_share[ranks],
        row=np.searchsorted(ranks, timeline.rank[drawn]),
        paint=paint[drawn],
        start_s=start_s[drawn],
        end_s=start_s[drawn] + (timeline.end_s - timeline.start_s)[drawn],
        number=timeline.microbatch[drawn].astype(np.int64),
        is_numbered=bool((timeline.microbatch > 0).any()),
        span=drawn,
        paints=tuple(_paint(style, hues) for style in styles),
        legend=_legend(styles, hues),
        makespan_s=timeline.makespan_s,
        facts=_facts(timeline.makespan_s, idle.total_share, len(ranks), len(leaders), len(leader)),
        timeline=timeline,
    )


def _drawn_in_part(timeline: AlikeTimeline, max_rows: int) -> Drawing:
    """The drawing of thousands of ranks that do the same, of which only those that are drawn are expanded."""
    share = bubble_shares(timeline)
    leaders, num_alike = np.unique(timeline.leader, return_counts=True)
    chosen = _chosen(share[leaders], max_rows)
    names = map(timeline.rank_name, leaders[chosen].tolist())
    some = timeline.some(leaders[chosen]).named(list(map(_row_name, names, num_alike[chosen].tolist())))
    drawing = draw(some, max_rows=max_rows)
    facts = _facts(timeline.makespan_s, float(share.mean()), len(drawing.ranks), len(leaders), timeline.num_ranks)
    return replace(drawing, ranks=leaders[chosen][drawing.ranks], makespan_s=timeline.makespan_s, facts=facts)


def _alike(timeline: Timeline, paint: Int64Array) -> Int64Array:
    """For each rank the first that has the same spans at the same times, int64 [num_ranks], by sums over its spans."""
    rank, scale = timeline.rank, timeline.makespan_s or 1.0
    start, end = ((each - timeline.start_s.min(initial=np.inf)) / scale for each in (timeline.start_s, timeline.end_s))
    told = np.ones(len(rank)), start, end, start * (paint + 1), end * (timeline.microbatch + 2), start**2
    sums = np.stack([np.bincount(rank, each, timeline.num_ranks) for each in told], axis=1)
    _, first, group = np.unique(np.round(sums, 7), axis=0, return_index=True, return_inverse=True)
    leader: Int64Array = first[group.reshape(-1)].astype(np.int64)
    return leader


def _row_name(rank_name: str, num_alike: int) -> str:
    return f"{rank_name} x{num_alike:,}" if num_alike > 1 else rank_name


def _styles(timeline: Timeline) -> tuple[list[SpanStyle], Int64Array]:
    """The styles of a Timeline, in order of appearance, and the index of each span's style, int64 [num_spans]."""
    kind, module, stream = (Labels.of(texts) for texts in (timeline.kind, timeline.module, timeline.stream))
    shape = len(kind.names), len(module.names), len(stream.names)
    code = np.ravel_multi_index((kind.number, module.number, stream.number), shape) if len(timeline) else kind.number
    # The first span of each code is written last, and stays.
    first = np.full(math.prod(shape), -1)
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    codes = np.flatnonzero(first >= 0)
    codes = codes[np.argsort(first[codes])]
    styles = [(timeline.kind[span], timeline.module[span], timeline.stream[span]) for span in first[codes].tolist()]
    index = {style: number for number, style in enumerate(dict.fromkeys(styles))}
    style_of_code = np.zeros(len(first), dtype=np.int64)
    style_of_code[codes] = [index[style] for style in styles]
    return list(index), style_of_code[code]


def mixed(colour: str, share: float) -> str:
    """A colour mixed with a share of white, or of black if the share is negative."""
    target = 255 if share > 0 else 0
    channels = (int(colour[first : first + 2], 16) for first in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (target - channel) * abs(share)):02x}" for channel in channels)


def is_light(colour: str) -> bool:
    """Whether dark text is easier to read on a colour than white text (luminance of ITU-R BT.601)."""
    red, green, blue = (int(colour[first : first + 2], 16) for first in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 150


def _facts(makespan_s: float, bubble_share: float, num_drawn: int, num_rows: int, num_ranks: int) -> str:
    facts = f"{shown_seconds(makespan_s)}, {bubble_share:.1%} bubbles"
    if num_drawn < num_rows:
        facts += f". {num_drawn} of {num_rows:,} rows: evenly spaced ones, and the most and the least busy"
    if num_rows < num_ranks:
        facts += ". A row with x2 stands for two that do the same at the same times"
    return facts


def _computes(kind: str, stream: str) -> bool:
    return stream == COMPUTE_STREAM and (kind in COMPUTE_KINDS or kind.split("_", maxsplit=1)[0] not in _COMMUNICATION)


def _hues(modules: Sequence[str]) -> dict[str, str]:
    """The hue of each module, by order of appearance. The backbone, or a lone module, has the same hue everywhere."""
    named = [module for module in dict.fromkeys(modules) if module]
    main = BACKBONE if BACKBONE in named or len(named) > 1 else next(iter(named), BACKBONE)
    others = [module for module in named if module != main]
    return {"": _NOBODYS_HUE, main: _BACKBONE_HUE} | {
        module: _HUES[number % len(_HUES)] for number, module in enumerate(others)
    }


def _paint(style: SpanStyle, hues: dict[str, str]) -> Paint:
    kind, module, stream = style
    if not _computes(kind, stream):
        return Paint(_communication(kind, stream)[1], True, module)
    if kind == Kind.STEP:
        return Paint(_OPTIMIZER, False, module)
    return Paint(_shaded(hues[module], kind), False, module)


def _chosen(bubble_share: Float64Array, max_rows: int) -> Int64Array:
    """The ranks that are drawn: all, or evenly spaced ones and the most and the least busy."""
    num_ranks = len(bubble_share)
    if num_ranks <= max_rows:
        return np.arange(num_ranks)
    # A third of max_rows, because readers look at these rows one by one.
    spaced = np.linspace(0, num_ranks - 1, max(max_rows // 3, 1)).round().astype(np.int64)
    return np.unique([*spaced.tolist(), int(bubble_share.argmin()), int(bubble_share.argmax())])


def _legend(styles: Sequence[SpanStyle], hues: dict[str, str]) -> tuple[LegendEntry, ...]:
    """What occurs: modules in their shades, shades in their hues, the optimizer, communication, bubbles."""
    computing = {(kind, module) for kind, module, stream in styles if _computes(kind, stream)}
    modules = [name for name in hues if name and any(m == name and kind != Kind.STEP for kind, m in computing)]
    shades = [shade for shade in _SHADES if any(kind == shade for kind, _ in computing)]

    def colours(pairs: list[tuple[str, str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_shaded(hues[m], kind) for kind, m in pairs if (kind, m) in computing))

    entries = [LegendEntry(m, colours([(kind, m) for kind in shades]) or (hues[m],)) for m in modules]
    entries += [LegendEntry(_SHADE_NAMES[kind], colours([(kind, m) for m in hues])[:_MAX_HUES]) for kind in shades]
    # What belongs to no module, and kinds without a shade.
    explained = {colour for entry in entries for colour in entry.colours}
    all_drawn = dict.fromkeys(_shaded(hues[m], kind) for kind, m in sorted(computing) if kind != Kind.STEP)
    if others := tuple(colour for colour in all_drawn if colour not in explained):
        entries.append(LegendEntry("other computation", others))
    if any(kind == Kind.STEP for kind, _ in computing):
        entries.append(LegendEntry("optimizer", (_OPTIMIZER,)))
    drawn = {_communication(kind, stream) for kind, _, stream in styles if not _computes(kind, stream)}
    known = dict.fromkeys([*_COMMUNICATION.values(), _TENSOR_COMMUNICATION, _OTHER_COMMUNICATION])
    return (
        *entries,
        *(LegendEntry(name, (colour,)) for name, colour in known if (name, colour) in drawn),
        LegendEntry("bubble", (BUBBLE,)),
    )


def _communication(kind: str, stream: str) -> tuple[str, str]:
    if stream == "tensor":
        return _TENSOR_COMMUNICATION
    return _COMMUNICATION.get(kind.split("_", maxsplit=1)[0], _OTHER_COMMUNICATION)


def _shaded(hue: str, kind: str) -> str:
    return mixed(hue, _SHADES[Kind(kind)]) if kind in COMPUTE_KINDS and kind != Kind.STEP else hue
