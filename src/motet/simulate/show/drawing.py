"""What a picture of a Timeline shows, whether it becomes a PNG (picture.py) or a page (page.py).

A row is a rank, with what it computes above and what it communicates in a thin band below. Hue says whose an action is;
lightness what it does, from palest to darkest: recomputation, forward, backward, backward for the weights alone. What
is left of a row's background is bubble. The hues are told apart by the colour-blind (Okabe and Ito, 2008);
communication has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.timeline import COMPUTE_STREAM, Timeline
from motet.core.workload import BACKBONE
from motet.schedule.program import COMPUTE_KINDS, Kind
from motet.simulate.bubbles import bubbles
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
"""Of a shade, in the legend."""

Look = tuple[str, str, str]
"""Kind, module, stream: what decides how a span is drawn."""


class Paint(NamedTuple):
    """How a span of a module is drawn. band: in the thin band of communication, not among what is computed."""

    colour: str
    band: bool
    module: str


class LegendEntry(NamedTuple):
    """An entry of the legend: a name, and the colours that it stands for."""

    name: str
    colours: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Drawing:
    """Boxes in rows.

    ranks:          int64 [num_rows], ascending. names: of these. bubble_share: float64 [num_rows], of the makespan.
    row, paint:     int64 [num_boxes]. start_s, end_s: float64 [num_boxes], from the first start of the Timeline.
    number:         int64 [num_boxes], the microbatch, -1 where there is none. span: int64 [num_boxes], in the Timeline.
    facts: a sentence: makespan, bubbles over all ranks, and which ranks are drawn where some are not.
    """

    ranks: Int64Array
    names: tuple[str, ...]
    bubble_share: Float64Array
    row: Int64Array
    paint: Int64Array
    start_s: Float64Array
    end_s: Float64Array
    number: Int64Array
    span: Int64Array
    paints: tuple[Paint, ...]
    legend: tuple[LegendEntry, ...]
    makespan_s: float
    facts: str


def draw(timeline: Timeline, *, max_rows: int) -> Drawing:
    """Lay out a Timeline; of more than `max_rows` ranks, some that stand for them. O(spans)."""
    known, paint = _looks(timeline)
    hues = _hues([module for kind, module, stream in known if _computes(kind, stream)])
    idle = bubbles(timeline)
    bubble_share = idle.idle_s.sum(axis=1) / (idle.step_s or 1.0)
    ranks = _chosen(bubble_share, max_rows)
    drawn = np.flatnonzero(np.isin(timeline.rank, ranks))
    start_s = timeline.start_s - timeline.start_s.min(initial=np.inf)
    drawn = drawn[np.lexsort((start_s[drawn], timeline.rank[drawn]))]
    return Drawing(
        ranks=ranks,
        names=tuple(map(timeline.rank_name, ranks.tolist())),
        bubble_share=bubble_share[ranks],
        row=np.searchsorted(ranks, timeline.rank[drawn]),
        paint=paint[drawn],
        start_s=start_s[drawn],
        end_s=start_s[drawn] + (timeline.end_s - timeline.start_s)[drawn],
        number=timeline.microbatch[drawn].astype(np.int64),
        span=drawn,
        paints=tuple(_paint(look, hues) for look in known),
        legend=_legend(known, hues),
        makespan_s=timeline.makespan_s,
        facts=_facts(timeline.makespan_s, idle.total_share, len(ranks), len(bubble_share)),
    )


def _looks(timeline: Timeline) -> tuple[list[Look], Int64Array]:
    """Those that there are, in order of appearance, and which of them each span has, int64 [num_spans]."""
    kind, module, stream = (Labels.of(texts) for texts in (timeline.kind, timeline.module, timeline.stream))
    shape = len(kind.names), len(module.names), len(stream.names)
    code = np.ravel_multi_index((kind.number, module.number, stream.number), shape) if len(timeline) else kind.number
    # The first span of each code, as it is written last.
    first = np.full(math.prod(shape), -1)
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    codes = np.flatnonzero(first >= 0)
    codes = codes[np.argsort(first[codes])]
    looks = [(timeline.kind[span], timeline.module[span], timeline.stream[span]) for span in first[codes].tolist()]
    number = {look: place for place, look in enumerate(dict.fromkeys(looks))}
    of_code = np.zeros(len(first), dtype=np.int64)
    of_code[codes] = [number[look] for look in looks]
    return list(number), of_code[code]


def mixed(colour: str, share: float) -> str:
    """A colour with a share of white, or of black where it is negative."""
    target = 255 if share > 0 else 0
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (target - channel) * abs(share)):02x}" for channel in channels)


def is_light(colour: str) -> bool:
    """Whether dark text is read more easily on it than white text (luminance of ITU-R BT.601)."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 150


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time has at least one digit before the point: (how many in a second, its name)."""
    return next(((scale, name) for scale, name in ((1.0, "s"), (1e3, "ms")) if seconds * scale >= 1), (1e6, "µs"))


def shown_seconds(seconds: float) -> str:
    """A time with four digits and its unit."""
    scale, unit = time_unit(seconds)
    value = seconds * scale
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def _facts(makespan_s: float, bubble_share: float, num_drawn: int, num_ranks: int) -> str:
    facts = f"{shown_seconds(makespan_s)}, {bubble_share:.1%} bubbles"
    if num_drawn < num_ranks:
        facts += f". {num_drawn} of {num_ranks:,} rows: evenly spaced ones, and the most and the least busy"
    return facts


def _computes(kind: str, stream: str) -> bool:
    return stream == COMPUTE_STREAM and (kind in COMPUTE_KINDS or kind.split("_", maxsplit=1)[0] not in _COMMUNICATION)


def _hues(modules: Sequence[str]) -> dict[str, str]:
    """Hue of each module, by order of appearance; that of the backbone, or of the only one, is the same everywhere."""
    named = [module for module in dict.fromkeys(modules) if module]
    main = BACKBONE if BACKBONE in named or len(named) > 1 else next(iter(named), BACKBONE)
    others = [module for module in named if module != main]
    return {"": _NOBODYS_HUE, main: _BACKBONE_HUE} | {
        module: _HUES[place % len(_HUES)] for place, module in enumerate(others)
    }


def _paint(look: Look, hues: dict[str, str]) -> Paint:
    kind, module, stream = look
    if not _computes(kind, stream):
        return Paint(_communication(kind, stream)[1], True, module)
    if kind == Kind.STEP:
        return Paint(_OPTIMIZER, False, module)
    return Paint(_shaded(hues[module], kind), False, module)


def _chosen(bubble_share: Float64Array, max_rows: int) -> Int64Array:
    num_ranks = len(bubble_share)
    if num_ranks <= max_rows:
        return np.arange(num_ranks)
    # Fewer than could be drawn: what stands for others is to be looked at one by one.
    spaced = np.linspace(0, num_ranks - 1, max(max_rows // 3, 1)).round().astype(np.int64)
    return np.unique([*spaced.tolist(), int(bubble_share.argmin()), int(bubble_share.argmax())])


def _legend(looks: Sequence[Look], hues: dict[str, str]) -> tuple[LegendEntry, ...]:
    """Modules, each in the shades that it has; shades, each in the hues that have it; the rest. Only what there is."""
    computing = {(kind, module) for kind, module, stream in looks if _computes(kind, stream)}
    modules = [
        module for module in hues if module and any(of == module and kind != Kind.STEP for kind, of in computing)
    ]
    shades = [kind for kind in _SHADES if any(kind == found for found, _ in computing)]

    def colours(pairs: list[tuple[str, str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_shaded(hues[of], kind) for kind, of in pairs if (kind, of) in computing))

    keys = [LegendEntry(of, colours([(kind, of) for kind in shades]) or (hues[of],)) for of in modules]
    keys += [LegendEntry(_SHADE_NAMES[kind], colours([(kind, of) for of in hues])[:_MAX_HUES]) for kind in shades]
    if any(kind == Kind.STEP for kind, _ in computing):
        keys.append(LegendEntry("optimizer", (_OPTIMIZER,)))
    found = {_communication(kind, stream) for kind, _, stream in looks if not _computes(kind, stream)}
    known = dict.fromkeys([*_COMMUNICATION.values(), _TENSOR_COMMUNICATION, _OTHER_COMMUNICATION])
    return (
        *keys,
        *(LegendEntry(name, (colour,)) for name, colour in known if (name, colour) in found),
        LegendEntry("bubble", (BUBBLE,)),
    )


def _communication(kind: str, stream: str) -> tuple[str, str]:
    if stream == "tensor":
        return _TENSOR_COMMUNICATION
    return _COMMUNICATION.get(kind.split("_", maxsplit=1)[0], _OTHER_COMMUNICATION)


def _shaded(hue: str, kind: str) -> str:
    return mixed(hue, _SHADES[Kind(kind)]) if kind in COMPUTE_KINDS and kind != Kind.STEP else hue
