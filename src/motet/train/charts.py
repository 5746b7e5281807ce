"""Three kinds of chart as inline SVG text, coloured by the page's CSS classes (`s0`, `s1`, ... are the series colours)."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34


def line_chart(
    series: Mapping[str, Points], *, x_label: str, y_label: str, y_min: float | None = None, faint: bool = False
) -> str:
    """Lines over a common x axis. faint: the first series is drawn thin, as the raw values behind a smoothed line."""
    points = [point for line in series.values() for point in line if math.isfinite(point[1])]
    if not points:
        return "<p>No values.</p>"
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low = min(y for _, y in points) if y_min is None else y_min
    y_high = max(y for _, y in points)
    ticks = _ticks(y_low, y_high)
    y_low, y_high = min(y_low, ticks[0]), max(y_high, ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1)
        up = (y - y_low) / ((y_high - y_low) or 1)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    x_ticks = [(x, place(x, 0)[0]) for x in _ticks(x_low, x_high) if x_low <= x <= x_high]
    parts = _axes(ticks, x_ticks, lambda y: place(0, y)[1], x_label, y_label)
    for number, (name, line) in enumerate(series.items()):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in line if math.isfinite(y)))
        style = "line faint" if faint and number == 0 else "line"
        parts.append(
            f'<polyline class="{style} s{number}" points="{path}"><title>{html.escape(name)}</title></polyline>'
        )
    return _svg(parts, _HEIGHT) + _legend(list(series))


def grouped_bars(
    series: Mapping[str, Sequence[float]], groups: Sequence[str], *, y_label: str, rule: tuple[str, float] | None = None
) -> str:
    """A group of bars for each of `groups`, a bar a series. rule: name and height of a dashed horizontal line."""
    highest = max([value for values in series.values() for value in values] + ([rule[1]] if rule else []) + [1e-12])
    ticks = _ticks(0, highest)
    top = ticks[-1]

    def height(value: float) -> float:
        return value / top * (_HEIGHT - _TOP - _BOTTOM)

    def level(value: float) -> float:
        return _HEIGHT - _BOTTOM - height(value)

    slot = (_WIDTH - _LEFT - _RIGHT) / max(len(groups), 1)
    every = math.ceil(len(groups) / 16)
    labels = [(group, _LEFT + (i + 0.5) * slot) for i, group in enumerate(groups) if i % every == 0]
    parts = _axes(ticks, labels, level, "", y_label)
    bar = min(slot * 0.8 / max(len(series), 1), 40)
    for number, (name, values) in enumerate(series.items()):
        for i, value in enumerate(values):
            x = _LEFT + (i + 0.5) * slot + (number - len(series) / 2) * bar
            title = f"{name}, {groups[i]}: {_number(value)}"
            parts.append(
                f'<rect class="bar s{number}" x="{x:.1f}" y="{level(value):.1f}" width="{max(bar - 1, 0.5):.1f}" '
                f'height="{height(value):.1f}"><title>{html.escape(title)}</title></rect>'
            )
    if rule:
        y = level(rule[1])
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">{html.escape(rule[0])}</text>'
        )
    return _svg(parts, _HEIGHT) + _legend(list(series))


def horizontal_bars(values: Mapping[str, float], *, unit: str) -> str:
    """One bar a name, longest possible for the largest value, the value written at its end."""
    largest = max([*values.values(), 1e-12])
    left, row = 190, 24
    parts = []
    for i, (name, value) in enumerate(values.items()):
        y, width = i * row + 4, value / largest * (_WIDTH - left - 90)
        parts.append(f'<text class="name" x="{left - 8}" y="{y + 12}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(f'<rect class="bar s1" x="{left}" y="{y}" width="{max(width, 0.5):.1f}" height="{row - 8}"/>')
        parts.append(f'<text class="tick" x="{left + width + 6:.1f}" y="{y + 12}">{_number(value)} {unit}</text>')
    return _svg(parts, max(len(values), 1) * row + 4)


def _axes(y_ticks, x_ticks, level, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = level(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick, x in x_ticks:
        text = tick if isinstance(tick, str) else _number(tick)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{html.escape(text)}</text>'
        )
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text class="axis" transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>'
    )
    parts.append(
        f'<text class="axis" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 3}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    return parts


def _svg(parts: list[str], height: float) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _legend(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    keys = "".join(f'<span><i class="key s{i}"></i>{html.escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{keys}</div>'


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high` (for axes that begin and end on a tick)."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / wanted
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _number(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
