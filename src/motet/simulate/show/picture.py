"""A Timeline as a PNG: a row a rank, time to the right, the share of bubbles at the end of each row.

Boxes are painted by array arithmetic, letters by Pillow: a plotting library takes longer to import than this to draw.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from motet.core.arrays import BoolArray, Float64Array, Int64Array, UInt8Array
from motet.core.errors import UserError
from motet.core.timeline import Timeline
from motet.core.words import time_unit
from motet.simulate.show.drawing import BUBBLE, INK, SOFT, Drawing, LegendEntry, draw, is_light

_MAX_ROWS = 96
_PIXELS_PER_INCH = 160
_WIDTH, _LEFT, _RIGHT, _FOOT = 2240, 184, 120, 80
"""Pixels, as all lengths here: width of the picture, and margins left of, right of and below the rows."""
_MARGIN, _LINE, _SWATCH = 20, 38, 38
_BREADTH = _WIDTH - _LEFT - _RIGHT
_COMPUTE_SHARE = 0.74
_PARTS = (_COMPUTE_SHARE, 0.78, 0.96)
"""Shares of a row's height: where compute ends, and where the band of communication begins and ends."""
_LINE_LETTERS = 170
_RUN_GAP = 4.0
"""The most pixels between boxes of a run, which may have one number."""
_LINES = ((16.0, 0.9), (5.0, 0.55))
"""(least width of a box, width of the white line at its end). Such boxes take whole pixels."""


def write_png(
    timeline: Timeline, path: str | Path, *, title: str = "", note: str = "", max_rows: int = _MAX_ROWS
) -> None:
    """Draw a Timeline. Of more than max_rows ranks only some are drawn; the picture says which.

    note: a sentence above the rows.
    Raises UserError if the file cannot be written. O(spans); a million spans take about a second.
    """
    drawing = draw(timeline, max_rows=max_rows)
    head = [line for line in (title, drawing.facts, *textwrap.wrap(note, _LINE_LETTERS)) if line]
    legend = _lines(drawing.legend)
    num_rows = max(len(drawing.ranks), 1)
    row_height = round(float(np.clip(5.0 / num_rows, 0.15, 0.46)) * _PIXELS_PER_INCH)
    top = 2 * _MARGIN + _LINE * (len(head) + len(legend))
    picture = Image.new("RGB", (_WIDTH, top + num_rows * row_height + _FOOT), "white")
    picture.paste(Image.fromarray(_rows(drawing, row_height)), (_LEFT, top))
    pen = ImageDraw.Draw(picture)
    _draw_head(pen, head, legend)
    _draw_labels(pen, drawing, row_height, top)
    _draw_scale(pen, drawing.makespan_s, top + num_rows * row_height)
    try:
        picture.save(path, format="PNG", compress_level=1)
    except OSError as error:
        raise UserError(f"the picture cannot be written to {path}: {error.strerror}.") from error


def _rows(drawing: Drawing, row_height: int) -> UInt8Array:
    """The rows' pixels, [num_rows x row_height, _BREADTH, 3]."""
    num_rows = max(len(drawing.ranks), 1)
    lanes = _lanes(drawing, 2 * num_rows)
    bubble, blank = len(lanes), len(lanes) + 1
    flat = np.array([_channels(BUBBLE), _channels("#ffffff")]).repeat(_BREADTH, axis=0).reshape(2, _BREADTH, 3)
    painted = np.concatenate([lanes, flat]).astype(np.uint8)
    parts = np.searchsorted(_PARTS, (np.arange(row_height) + 0.5) / row_height)
    shown = np.array([[2 * row, bubble, 2 * row + 1, blank] for row in range(num_rows)])
    pixels: UInt8Array = painted[shown[:, parts].reshape(-1)]
    return pixels


def _lanes(drawing: Drawing, num_lanes: int) -> Float64Array:
    """Colours of lanes, [num_lanes, _BREADTH, 3], whole numbers. A row has two lanes: its compute, then its band.

    The colour of a pixel is the mean of the boxes in it and of the bubble, weighted by the share that each covers.
    """
    lane = 2 * drawing.row + _in_band(drawing)
    colour = np.array([_channels(paint.colour) for paint in drawing.paints]).reshape(-1, 3)[drawing.paint]
    width = _widths(drawing)
    line = np.select([width >= least for least, _ in _LINES], [wide for _, wide in _LINES], 0.0)
    x = np.stack([drawing.start_s, drawing.end_s]) * _pixels_per_s(drawing)
    left, right = np.where(line > 0, np.rint(x), x).clip(0, _BREADTH)
    # What a line covers of its box is white.
    left, right = np.concatenate([left, right - line]), np.concatenate([right - line, right])
    colour, lane = np.concatenate([colour, np.full_like(colour, 255)]), np.concatenate([lane, lane])

    first = np.floor(left).astype(np.int64)
    num_pixels = np.ceil(right).astype(np.int64) - first
    box = np.repeat(np.arange(len(left)), num_pixels)
    column = np.arange(len(box)) + (first - np.cumsum(num_pixels) + num_pixels)[box]
    covered = np.minimum(right[box], column + 1) - np.maximum(left[box], column)
    cell, num_cells = lane[box] * _BREADTH + column, num_lanes * _BREADTH
    share = np.bincount(cell, covered, num_cells)[:, None]
    summed = [np.bincount(cell, covered * of_box, num_cells) for of_box in colour.T[:, box]]
    mean = (np.stack(summed, axis=1) + np.array(_channels(BUBBLE)) * (1 - share).clip(0)) / share.clip(1)
    lanes: Float64Array = np.rint(mean).reshape(num_lanes, _BREADTH, 3)
    return lanes


def _pixels_per_s(drawing: Drawing) -> float:
    return _BREADTH / max(drawing.makespan_s, 1e-300)


def _widths(drawing: Drawing) -> Float64Array:
    return (drawing.end_s - drawing.start_s) * _pixels_per_s(drawing)


def _in_band(drawing: Drawing) -> BoolArray:
    return np.array([paint.band for paint in drawing.paints], dtype=bool)[drawing.paint]


def _draw_labels(pen: ImageDraw.ImageDraw, drawing: Drawing, row_height: int, top: int) -> None:
    """Each row's rank and bubbles beside it, and the numbers of microbatches in the boxes that have room for them."""
    height = row_height * _COMPUTE_SHARE
    size = float(np.clip(height * 0.66, 10.0, 20.0))
    middle = [top + row * row_height + height / 2 for row in range(len(drawing.ranks))]
    for y, name, share in zip(middle, drawing.names, drawing.bubble_share.tolist()):
        narrower = min(1.0, (_LEFT - 12) / max(_font(size).getlength(name), 1.0))
        pen.text((_LEFT - 8, y), name, INK, _font(float(round(size * narrower))), anchor="rm")
        pen.text((_LEFT + _BREADTH + 14, y), f"{share:.1%}", INK, _font(size), anchor="lm")
    ink = [INK if is_light(paint.colour) else "white" for paint in drawing.paints]
    for box, number_size, x in _numbers(drawing, size):
        at = _LEFT + x, middle[drawing.row[box]]
        pen.text(at, str(drawing.number[box]), ink[drawing.paint[box]], _font(number_size), anchor="mm")


def _numbers(drawing: Drawing, size: float) -> Iterator[tuple[int, float, float]]:
    """(a box, the size of its number, where its middle is in the row) of each number that is drawn.

    A box has its number if there is room. If no box of a run has, as where a pass is drawn layer by layer, the run has
    one: boxes in a row that are painted alike and are of one microbatch. It has none where it is mostly empty, as of a
    rank without items, whose layers take no time. size: the largest, and twice the smallest.
    """
    if not drawing.is_numbered:
        return
    boxes = np.flatnonzero((drawing.number >= 0) & ~_in_band(drawing))
    start, end = (each[boxes] * _pixels_per_s(drawing) for each in (drawing.start_s, drawing.end_s))
    run = _runs(drawing, boxes, start, end)
    num_letters = np.char.str_len(drawing.number[boxes].astype(str))
    least = max(0.5 * size, 9.0) * (num_letters * 0.62 + 0.2)
    has_room = end - start > least
    first = np.flatnonzero(np.diff(run, prepend=-1))
    whole = np.zeros(len(boxes), dtype=bool)
    last_end = end[np.append(first[1:], len(boxes)) - 1] if len(first) else end
    is_painted = np.bincount(run, end - start) > 0.5 * (last_end - start[first])
    whole[first] = (np.bincount(run, has_room) == 0) & is_painted
    end[first] = np.where(whole[first], last_end, end[first])
    for place in np.flatnonzero(has_room | (whole & (end - start > least))).tolist():
        fitting = (end[place] - start[place]) / (num_letters[place] * 0.62 + 0.2)
        yield int(boxes[place]), float(min(size, round(fitting))), float(start[place] + end[place]) / 2


def _runs(drawing: Drawing, boxes: Int64Array, start: Float64Array, end: Float64Array) -> Int64Array:
    """The number of the run of each box, int64 [num_boxes], from 0. start, end: pixels."""
    told = np.stack([drawing.row[boxes], drawing.paint[boxes], drawing.number[boxes]])
    breaks = (np.diff(told) != 0).any(axis=0) | (start[1:] - end[:-1] > _RUN_GAP)
    runs: Int64Array = np.cumsum(np.concatenate([np.zeros(min(len(boxes), 1), dtype=np.int64), breaks]))
    return runs


def _draw_scale(pen: ImageDraw.ImageDraw, makespan_s: float, top: int) -> None:
    scale, unit = time_unit(makespan_s)
    for tick in _ticks(makespan_s * scale):
        x = _LEFT + tick / max(makespan_s * scale, 1e-300) * _BREADTH
        pen.line((x, top, x, top + 7), SOFT, 2)
        pen.text((x, top + 12), f"{tick:,.10g}", SOFT, _font(18.0), anchor="ma")
    pen.text((_LEFT + _BREADTH / 2, top + 42), unit, SOFT, _font(20.0), anchor="ma")


def _ticks(last: float) -> list[float]:
    """Round numbers from 0 to at most `last`, five to eleven."""
    if not last > 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(last / 4))
    step = max(round_number * power for round_number in (1, 2, 5) if round_number * power <= last / 4)
    return [place * step for place in range(int(last / step) + 1)]


def _draw_head(pen: ImageDraw.ImageDraw, head: list[str], legend: list[list[LegendEntry]]) -> None:
    """Title and facts, then the legend, from the top downwards."""
    y = _MARGIN + _LINE // 2
    pen.text((_LEFT, y), head[0], INK, _font(28.0), anchor="lm", stroke_width=0.5)
    for line in head[1:]:
        y += _LINE
        pen.text((_LEFT, y), line, SOFT, _font(20.0), anchor="lm")
    for keys in legend:
        y += _LINE
        x = float(_LEFT)
        for key in keys:
            _draw_key(pen, key, x, y)
            x += _key_width(key)
    pen.text((_LEFT + _BREADTH + 14, y + _LINE // 2 + 4), "bubbles", SOFT, _font(17.0), anchor="lm")


def _draw_key(pen: ImageDraw.ImageDraw, key: LegendEntry, x: float, y: float) -> None:
    each = _SWATCH / len(key.colours)
    for place, colour in enumerate(key.colours):
        pen.rectangle((round(x + place * each), y - 9, round(x + (place + 1) * each) - 1, y + 8), colour)
    pen.text((x + _SWATCH + 10, y), key.name, INK, _font(19.0), anchor="lm")


def _key_width(key: LegendEntry) -> float:
    return _SWATCH + 10 + _font(19.0).getlength(key.name) + 36


def _lines(legend: Sequence[LegendEntry]) -> list[list[LegendEntry]]:
    """The keys in lines that are no wider than the picture."""
    lines: list[list[LegendEntry]] = [[]]
    for key in legend:
        if lines[-1] and sum(map(_key_width, [*lines[-1], key])) > _WIDTH - _LEFT:
            lines.append([])
        lines[-1].append(key)
    return lines


@cache
def _font(size: float) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "with a size, Pillow gives its outline font"
    return font


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))
