"""Positions of packed rows by time, row and column, as in multimodal rotary embedding (M-RoPE; Qwen2-VL, section 2.1).

A token of text has the same position on all three axes, one more than the largest before it. The rows of an image are a
grid that begins there: all at one time, each in its row and its column. So the text behind an image of 4 x 6 rows goes
on 6 further, and not 24. The frames of a video are such grids, each at its time; the text behind goes on from the
longer side of a frame as well, however late the last frame is, as transformers has it; in Qwen2.5-Omni it goes on from
the largest position. Rows of a clip have positions as text has them (TMRoPE; Qwen2.5-Omni, section 2.2).

A video and its sound begin together: their placeholders alternate (`core/alternating.py`), each at its own time, and
the text behind goes on from the last of them. The marks around them are two tokens before and two behind; as in
transformers, either two have one position.
"""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Float32Array, Int64Array

NUM_AXES = 3
"""Time, row, column."""
GRID_DIM = 5
"""Of a placeholder: frames, rows, columns, the time between two frames (`step_bits`), and how text goes on behind."""
BEHIND_SIDE, BEHIND_LARGEST, AS_TEXT = range(3)
"""How text goes on: behind the longer side of a frame, or behind the largest position; or rows are as text by
themselves, each a frame of one row."""
KEYS = AS_TEXT + 1
"""In the place of these: the item's rows are no rows of the sequence, but keys, of which text sees as many as the grid
has (`models/key_items.py`). All items of a backbone are so, or none."""
FRAME_AT, ROW_AT = KEYS + 1, KEYS + 2
"""In the place of these, of a video and its sound, which alternate: a frame, and a row of sound. They have their time,
in positions behind the begin of both, in the place of the step between two frames."""


def step_bits(steps: Float32Array) -> Int64Array:
    """The positions between two frames of each item, float32 [n], as what a grid holds: their bits, int64 [n].

    Positions are rounded as transformers rounds them, so a step must come to all ranks in its very bits.
    """
    return np.ascontiguousarray(steps, dtype=np.float32).view(np.int32).astype(np.int64)


def grid_positions(
    text_lengths: Int64Array, placeholders: Int64Array, num_rows: Int64Array, grids: Int64Array
) -> Int64Array:
    """The positions of the rows of packed sequences, int64 [3, num_packed_rows], from 0 in each sequence.

    text_lengths: int64 [num_sequences], tokens of each sequence, of which an item has one.
    placeholders: int64 [num_placeholders], the place of each among all tokens.
    num_rows:     int64 [num_tokens], the packed rows of each token.
    grids:        int64 [num_placeholders, 5], frames, rows and columns of the rows at each, the step of its frames
                  (`step_bits`), and how text goes on behind it (`BEHIND_SIDE`, ...).
    Raises ValueError where an item has another number of rows than its grid, and where placeholders that alternate are
    not between two pairs of tokens. O(num_packed_rows).

    Example:
        A token, an image of 2 x 2 rows, a token:
        >>> grids = np.array([[1, 2, 2, 0, BEHIND_SIDE]])
        >>> grid_positions(np.array([3]), np.array([1]), np.array([1, 4, 1]), grids).tolist()
        [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    """
    if not np.array_equal(num_rows[placeholders], grids[:, :3].prod(axis=1)):
        raise ValueError(f"items of {num_rows[placeholders].tolist()} rows have the grids {grids.tolist()}")
    advance, width, area = (np.ones_like(num_rows) for _ in range(3))
    step = np.zeros(len(num_rows), dtype=np.float32)
    steps, behind = grids[:, 3].astype(np.int32).view(np.float32), grids[:, 4]
    alternates = behind >= FRAME_AT
    late = np.zeros_like(num_rows)
    late[placeholders] = np.where(alternates, grids[:, 3], 0)
    steps = np.where(alternates, np.float32(0), steps)
    sides = grids[:, 1:3].max(axis=1, initial=0)
    largest = np.maximum(sides, ((grids[:, 0] - 1).astype(np.float32) * steps).astype(np.int64) + 1)
    none = np.zeros_like(sides)
    advance[placeholders] = np.choose(behind, (sides, largest, grids[:, 0], none, none, none))
    if alternates.any():
        beyond = np.maximum(grids[:, 3] + 1, np.where(behind == FRAME_AT, sides, 0))
        _join_marks(advance, text_lengths, placeholders[alternates], beyond[alternates], placeholders)
    width[placeholders], area[placeholders], step[placeholders] = grids[:, 2], grids[:, 1] * grids[:, 2], steps
    as_text = np.zeros(len(num_rows), dtype=bool)
    as_text[placeholders] = (behind == AS_TEXT) | (behind == ROW_AT)
    before = np.cumsum(advance) - advance
    first_tokens = np.cumsum(text_lengths) - text_lengths
    has_tokens = text_lengths > 0
    begin = before - np.repeat(before[first_tokens[has_tokens]], text_lengths[has_tokens])
    token = np.repeat(np.arange(len(num_rows)), num_rows)
    inside = np.arange(len(token)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    frame, inside = np.divmod(inside, area[token])
    row, column = np.divmod(inside, width[token])
    time = np.where(as_text[token], frame, (frame.astype(np.float32) * step[token]).astype(np.int64)) + late[token]
    row, column = (np.where(as_text[token], time, each) for each in (row, column))
    return np.stack([begin[token] + time, begin[token] + row, begin[token] + column]).astype(np.int64)


def _join_marks(
    advance: Int64Array, text_lengths: Int64Array, places: Int64Array, beyond: Int64Array, placeholders: Int64Array
) -> None:
    """Let text go on behind the last of each run of placeholders that alternate, and give two marks one position.

    advance: positions that each token takes, int64 [num_tokens], of such placeholders 0; changed in place.
    places:  of such placeholders, and beyond: how far behind the begin of its run text goes on behind each, int64 [n].
    Raises ValueError where a run is not between two tokens of text on either side.
    """
    order = np.argsort(places)
    places, beyond = places[order], beyond[order]
    is_first = np.diff(places, prepend=-2) > 1
    is_last = np.append(is_first[1:], True)
    first, last = places[is_first], places[is_last]
    ends = np.cumsum(text_lengths)
    of_run = np.searchsorted(ends, first, side="right")
    is_cut = (first - 2 < (ends - text_lengths)[of_run]) | (last + 2 >= ends[of_run])
    if is_cut.any() or np.isin(np.concatenate([first - 2, first - 1, last + 1, last + 2]), placeholders).any():
        raise ValueError("a video and its sound are not between two marks on either side")
    advance[last] = beyond[is_last]
    advance[first - 2] = 0
    advance[last + 1] = 0
