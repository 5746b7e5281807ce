"""A Timeline as a PNG: a row a rank, time to the right, the share of bubbles at the end of each row."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import UserError
from motet.core.timeline import Timeline
from motet.simulate.drawing import BUBBLE, INK, SOFT, Drawing, Key, draw, is_light, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ROWS = 96
_WIDTH_INCHES, _LEFT_INCHES, _RIGHT_INCHES = 14.0, 0.8, 0.75
_PIXELS_PER_INCH = 160
_COMPUTE_SHARE = 0.74
"""Of a row's height; below it is the band of communication."""
_LINE_INCHES, _SWATCH_INCHES = 0.24, 0.24
_LINE_LETTERS = 170


def write_png(
    timeline: Timeline, path: str | Path, *, title: str = "", note: str = "", max_rows: int = _MAX_ROWS
) -> None:
    """Draw a Timeline. Of more than max_rows ranks, some are drawn that stand for all, and it is said which.

    note: a sentence that stands above the rows.
    Raises UserError if the file cannot be written. O(spans); a million spans take some 20 s.
    """
    # Late, and without pyplot: matplotlib takes long to import, and no state of it outlives the picture.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = draw(timeline, max_rows=max_rows)
    head = [line for line in (title, drawing.facts, *textwrap.wrap(note, _LINE_LETTERS)) if line]
    legend = _lines(drawing.legend)
    num_rows = max(len(drawing.ranks), 1)
    row_inches = float(np.clip(5.0 / num_rows, 0.15, 0.46))
    head_inches, foot_inches = 0.25 + _LINE_INCHES * (len(head) + len(legend)), 0.5
    height = head_inches + foot_inches + num_rows * row_inches
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_PIXELS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    breadth = _WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES
    x, y = _LEFT_INCHES / _WIDTH_INCHES, foot_inches / height
    axes = figure.add_axes((x, y, breadth / _WIDTH_INCHES, num_rows * row_inches / height))
    font_size = float(np.clip(row_inches * _COMPUTE_SHARE * 72 * 0.66, 4.5, 9.0))
    _draw_boxes(axes, drawing)
    _draw_numbers(axes, drawing, font_size)
    _draw_scales(axes, drawing, font_size)
    _draw_head(figure, head, legend)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"the picture cannot be written to {path}: {error.strerror}.") from error


def _pixels_per_s(drawing: Drawing) -> float:
    width = (_WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES) * _PIXELS_PER_INCH
    return width / max(drawing.makespan_s, 1e-300)


def _widths(drawing: Drawing) -> NDArray[np.float64]:
    """In pixels."""
    return (drawing.end_s - drawing.start_s) * _pixels_per_s(drawing)


def _draw_boxes(axes: Axes, drawing: Drawing) -> None:
    from matplotlib.collections import PolyCollection

    num_rows = len(drawing.ranks)
    scale, _ = time_unit(drawing.makespan_s)
    for row in range(num_rows):
        axes.axhspan(row, row + 0.96, color=BUBBLE, linewidth=0)
    band = np.array([paint.band for paint in drawing.paints], dtype=bool)[drawing.paint]
    colours = np.array([paint.colour for paint in drawing.paints], dtype=object)[drawing.paint]
    top = drawing.row + np.where(band, _COMPUTE_SHARE + 0.04, 0.0)
    bottom = drawing.row + np.where(band, 0.96, _COMPUTE_SHARE)
    x0, x1 = drawing.start_s * scale, drawing.end_s * scale
    corners = np.stack([x0, top, x0, bottom, x1, bottom, x1, top], axis=1).reshape(-1, 4, 2)
    width = _widths(drawing)
    for chosen, line in ((width < 5, 0.0), ((width >= 5) & (width < 16), 0.25), (width >= 16, 0.4)):
        boxes = PolyCollection(
            list(corners[chosen]), facecolors=colours[chosen].tolist(), edgecolors="white", linewidths=line
        )
        # Boxes narrower than a pixel would be lost if snapped to whole ones, and faint if blended with what is below.
        boxes.set_snap(line > 0)
        boxes.set_antialiased(line > 0)
        axes.add_collection(boxes)


def _draw_numbers(axes: Axes, drawing: Drawing, font_size: float) -> None:
    scale, _ = time_unit(drawing.makespan_s)
    digits = np.char.str_len(drawing.number.astype(str))
    fitting_size = _widths(drawing) / _PIXELS_PER_INCH * 72 / (digits * 0.62 + 0.2)
    has_room = fitting_size > max(0.5 * font_size, 4.0)
    is_numbered = (drawing.number >= 0) & ~np.array([paint.band for paint in drawing.paints], dtype=bool)[drawing.paint]
    for place in np.flatnonzero(has_room & is_numbered).tolist():
        axes.text(
            float(drawing.start_s[place] + drawing.end_s[place]) / 2 * scale,
            float(drawing.row[place]) + _COMPUTE_SHARE / 2,
            str(drawing.number[place]),
            fontsize=min(font_size, float(fitting_size[place])),
            color=INK if is_light(drawing.paints[drawing.paint[place]].colour) else "white",
            ha="center",
            va="center_baseline",
        )


def _draw_scales(axes: Axes, drawing: Drawing, font_size: float) -> None:
    num_rows = len(drawing.ranks)
    scale, unit = time_unit(drawing.makespan_s)
    axes.set_xlim(0, max(drawing.makespan_s * scale, 1e-300))
    axes.set_ylim(max(num_rows, 1), 0)
    axes.set_xlabel(unit, color=SOFT, fontsize=9)
    axes.set_yticks([row + _COMPUTE_SHARE / 2 for row in range(num_rows)])
    axes.set_yticklabels([f"rank {rank}" for rank in drawing.ranks.tolist()], fontsize=font_size)
    axes.tick_params(axis="y", length=0, colors=INK)
    axes.tick_params(axis="x", colors=SOFT, labelsize=8)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(False)
    for row, share in enumerate(drawing.bubble_share.tolist()):
        axes.annotate(
            f"{share:.1%}",
            (1, row + _COMPUTE_SHARE / 2),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=font_size,
            color=INK,
            va="center_baseline",
        )


def _draw_head(figure: Figure, head: list[str], legend: list[list[Key]]) -> None:
    """Title and facts, then the legend, from the top downwards."""
    width, height = figure.get_size_inches()
    top = 0.2
    for size, colour, text in ((12, INK, head[0]), *((9, SOFT, line) for line in head[1:])):
        figure.text(
            _LEFT_INCHES / width, 1 - top / height, text, fontsize=size, color=colour, va="center",
            weight="bold" if colour == INK else "normal",
        )  # fmt: skip
        top += _LINE_INCHES
    for line in legend:
        left = _LEFT_INCHES
        for key in line:
            _draw_key(figure, key, left, top)
            left += _key_inches(key)
        top += _LINE_INCHES
    figure.text(1 - (_RIGHT_INCHES - 0.06) / width, 1 - (top + 0.02) / height, "bubbles", fontsize=7.5, color=SOFT)


def _draw_key(figure: Figure, key: Key, left: float, top: float) -> None:
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    each = _SWATCH_INCHES / len(key.colours)
    for place, colour in enumerate(key.colours):
        corner = ((left + place * each) / width, 1 - (top + 0.055) / height)
        figure.add_artist(Rectangle(corner, each / width, 0.11 / height, color=colour, linewidth=0))
    name = ((left + _SWATCH_INCHES + 0.07) / width, 1 - top / height)
    figure.text(*name, key.name, fontsize=8, color=INK, va="center_baseline")


def _key_inches(key: Key) -> float:
    return _SWATCH_INCHES + 0.28 + 0.069 * len(key.name)


def _lines(legend: Sequence[Key]) -> list[list[Key]]:
    """The keys in lines that are no wider than the picture."""
    lines: list[list[Key]] = [[]]
    for key in legend:
        if lines[-1] and sum(map(_key_inches, [*lines[-1], key])) > _WIDTH_INCHES - _LEFT_INCHES:
            lines.append([])
        lines[-1].append(key)
    return lines
