"""Three kinds of chart as inline SVG. The CSS classes `s0`, `s1`, ... of the page give each series its colour."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

ChartPoints = Sequence[tuple[float, float]]

WIDE, NARROW = 1000, 520
_NAME_WIDTH = 7
"""Of a character of a bar's name."""
_HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 12, 14, 36
"""Left: of the longest number of an axis, and the label beside it."""
_PLOT_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_MAX_MARKS = 40
"""Longer lines have no mark at each point."""


def line_chart(
    series: Mapping[str, ChartPoints],
    *,
    x_label: str,
    y_label: str,
    y_min: float | None = None,
    faint: str = "",
    width: int = WIDE,
) -> str:
    """Lines over a common x axis; short lines have a mark at each point. faint: the series that is drawn thin."""
    points = [point for line in series.values() for point in line]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    ticks = _ticks(min(y for _, y in points) if y_min is None else y_min, max(y for _, y in points))
    to_y = _scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    to_x = _scale(x_low, x_high, _LEFT, width - _RIGHT)
    parts = _axes(width, to_y, ticks, x_label, y_label)
    parts += [_label(to_x(x), _number(x)) for x in _ticks(x_low, x_high) if x_low <= x <= x_high]
    for number, (name, line) in enumerate(series.items()):
        points_px = [(to_x(x), to_y(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points_px)
        kind = f"line s{number}" + (" faint" if name == faint else "")
        parts.append(f'<polyline class="{kind}" points="{path}"><title>{html.escape(name)}</title></polyline>')
        if len(line) <= _MAX_MARKS:
            parts += [f'<circle class="bar s{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points_px]
    return _svg(parts, width, _HEIGHT) + _legend(list(series))


def grouped_bars(
    series: Mapping[str, Sequence[float]],
    groups: Sequence[str],
    *,
    y_label: str,
    rule: tuple[str, float],
    width: int = WIDE,
) -> str:
    """For each of `groups`, a bar a series. rule: (label, value) of a dashed horizontal line."""
    ticks = _ticks(0, max([value for values in series.values() for value in values] + [rule[1], 1e-12]))
    to_y = _scale(0, ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    group_width = (width - _LEFT - _RIGHT) / len(groups)
    parts = _axes(width, to_y, ticks, "", y_label)
    every = math.ceil(len(groups) / 8)
    parts += [_label(_LEFT + (i + 0.5) * group_width, group) for i, group in enumerate(groups) if i % every == 0]
    bar = min(group_width * 0.8 / len(series), 40)
    for number, (name, values) in enumerate(series.items()):
        for i, value in enumerate(values):
            x, y = _LEFT + (i + 0.5) * group_width + (number - len(series) / 2) * bar, to_y(value)
            title = html.escape(f"{name}, {groups[i]}: {_number(value)}")
            box = f'x="{x:.1f}" y="{y:.1f}" width="{max(bar - 1, 0.5):.1f}" height="{_HEIGHT - _BOTTOM - y:.1f}"'
            parts.append(f'<rect class="bar s{number}" {box}><title>{title}</title></rect>')
    y = to_y(rule[1])
    parts.append(f'<line class="rule" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(_text("tick", width - _RIGHT, y - 4, rule[0], "end"))
    return _svg(parts, width, _HEIGHT) + _legend(list(series))


def horizontal_bars(values: Mapping[str, float], *, unit: str) -> str:
    """A bar a name, in proportion to its value, with the value at its end."""
    left, right, row = max(190, 16 + _NAME_WIDTH * max(map(len, values), default=0)), 90, 24
    length = _scale(0, max([*values.values(), 1e-12]), 0, WIDE - left - right)
    parts = []
    for i, (name, value) in enumerate(values.items()):
        y = i * row + 4
        box = f'x="{left}" y="{y}" width="{max(length(value), 0.5):.1f}" height="{row - 8}"'
        parts.append(f'<rect class="bar s1" {box}/>')
        parts.append(_text("name", left - 8, y + 12, name, "end"))
        parts.append(_text("tick", left + length(value) + 6, y + 12, f"{_number(value)} {unit}", "start"))
    return _svg(parts, WIDE, len(values) * row + 4)


def _axes(width: int, to_y: Callable[[float], float], ticks: Sequence[float], x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in ticks:
        y = to_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("tick", _LEFT - 6, y + 4, _number(tick), "end"))
    parts.append(
        f'<g transform="translate(12 {_TOP + _PLOT_HEIGHT / 2}) rotate(-90)">{_text("axis", 0, 0, y_label)}</g>'
    )
    parts.append(_text("axis", (_LEFT + width) / 2, _HEIGHT - 3, x_label))
    return parts


def _label(x: float, text: str) -> str:
    return _text("tick", x, _HEIGHT - _BOTTOM + 16, text)


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(parts: list[str], width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _legend(names: list[str]) -> str:
    keys = "".join(f'<span><i class="key s{i}"></i>{html.escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{keys}</div>'


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The linear function from [low, high] to [start, end]."""
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def _ticks(low: float, high: float, num_steps: int = 5) -> list[float]:
    """About num_steps + 1 round numbers from at most `low` to at least `high`."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / num_steps
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _number(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
