"""Images of handwritten digits: sheets with one to three rows of one to eight digits.

This module decides which handwriting each split uses and how a sheet looks. Source: ``sklearn.datasets.load_digits``
(1797 digits of 8 x 8 pixels and 17 grey levels, written by many people). Every digit is in the middle of a cell of
12 x 12 pixels. A sheet has a thin frame, so that a model that sees one cell at a time can tell where a row ends.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image

from motet.core.errors import UserError

CELL_PIXELS = 12
DIGIT_PIXELS = 8
MAX_ROWS = 3
MAX_COLUMNS = 8
# Every fifth instance of a digit is held out, whatever the seed, so no call trains on a held-out one.
HELDOUT_EVERY = 5
_INK_LEVELS = 16.0


@dataclass(frozen=True)
class Handwriting:
    """The handwritten digits that one split may use.

    pixels: ``[num_instances, 8, 8]`` float, 0 (paper) to 1 (ink), of all instances of the source.
    instances: ``instances[digit]`` are the indices into ``pixels`` that this split may use.
    """

    pixels: np.ndarray
    instances: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sheet:
    """An image and its content: ``rows`` of digits, all of one length, and the instance of each digit."""

    rows: tuple[str, ...]
    instances: tuple[int, ...]
    png: bytes


def load_handwriting() -> dict[str, Handwriting]:
    """The handwriting of ``train`` and ``heldout``, which share no instance. Raises UserError without scikit-learn."""
    # Imported here because it takes a second, which reading a manifest or printing a help text should not cost.
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("The digits need scikit-learn; install it with: pip install 'motet[demo]'.") from error

    source = load_digits()
    pixels = source.images / _INK_LEVELS
    chosen: dict[str, list[tuple[int, ...]]] = {"train": [], "heldout": []}
    for digit in range(10):
        of_digit = [int(index) for index in np.flatnonzero(source.target == digit)]
        heldout = of_digit[::HELDOUT_EVERY]
        chosen["heldout"].append(tuple(heldout))
        chosen["train"].append(tuple(sorted(set(of_digit) - set(heldout))))
    return {split: Handwriting(pixels, tuple(instances)) for split, instances in chosen.items()}


def draw_sheet(rows: tuple[str, ...], handwriting: Handwriting, rng: random.Random) -> Sheet:
    """Draw rows of digits on an 8-bit grey PNG, ``12 * len(rows)`` pixels high and ``12 * len(rows[0])`` wide.

    Raises ValueError for ragged or empty rows.
    """
    if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
        raise ValueError(f"rows of a sheet must be non-empty and of one length, got {rows!r}")
    height, width = CELL_PIXELS * len(rows), CELL_PIXELS * len(rows[0])
    paper = rng.randint(215, 255)
    sheet = np.full((height, width), float(paper))
    frame = paper - rng.randint(70, 110)
    sheet[[0, -1], :] = frame
    sheet[:, [0, -1]] = frame
    instances = []
    margin = (CELL_PIXELS - DIGIT_PIXELS) // 2
    for row_index, row in enumerate(rows):
        for column, digit in enumerate(row):
            instance = rng.choice(handwriting.instances[int(digit)])
            instances.append(instance)
            top, left = row_index * CELL_PIXELS + margin, column * CELL_PIXELS + margin
            ink = rng.randint(0, 60)
            cell = sheet[top : top + DIGIT_PIXELS, left : left + DIGIT_PIXELS]
            cell -= (cell - ink) * handwriting.pixels[instance]
    return Sheet(rows, tuple(instances), _encode_png(np.rint(sheet).astype(np.uint8)))


def _encode_png(grey: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(grey, mode="L").save(stream, format="PNG", optimize=False, compress_level=6)
    return stream.getvalue()
