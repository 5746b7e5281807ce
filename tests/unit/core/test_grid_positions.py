"""Positions of packed rows on three axes."""

import numpy as np
import pytest

from motet.core.grid_positions import AS_TEXT, BEHIND_LARGEST, BEHIND_SIDE, grid_positions, step_bits


def one_by_one(text_length, images):
    """The positions of one sequence, token by token.

    images: place of a placeholder -> its grid, step of frames, and how text goes on behind it.
    """
    found, largest = [], -1
    for place in range(text_length):
        start = largest + 1
        frames, height, width, step, behind = images.get(place, (1, 1, 1, 0.0, BEHIND_SIDE))
        if behind == AS_TEXT:
            found += [(start + row,) * 3 for row in range(frames)]
            largest = start + frames - 1
            continue
        times = [int(np.float32(frame) * np.float32(step)) for frame in range(frames)]
        found += [
            (start + time, start + row, start + column)
            for time in times
            for row in range(height)
            for column in range(width)
        ]
        # However late the last frame is, as transformers has it; but in Qwen2.5-Omni.
        latest = times[-1] if behind == BEHIND_LARGEST else 0
        largest = start + max(height - 1, width - 1, latest)
    return found


def test_frames_stand_at_their_time_and_text_goes_on_behind_the_longer_side():
    rng = np.random.default_rng(2)
    lengths, placeholders, grids, expected = [], [], [], []
    for length in (5, 1, 0, 9, 4):
        chosen = sorted(rng.choice(length, size=min(length, int(rng.integers(0, 4))), replace=False).tolist())
        of_sequence = {}
        for place in chosen:
            behind = int(rng.choice([BEHIND_SIDE, BEHIND_LARGEST, AS_TEXT]))
            grid = (int(rng.integers(0, 6)), 1, 1) if behind == AS_TEXT else rng.integers(1, 6, 3).tolist()
            of_sequence[place] = (*grid, 0.1 * rng.integers(1, 40), behind)
        placeholders += [sum(lengths) + place for place in chosen]
        grids += [[*each[:3], *step_bits(np.float32([each[3]])), each[4]] for each in of_sequence.values()]
        expected += one_by_one(length, of_sequence)
        lengths.append(length)
    grids = np.array(grids)
    num_rows = np.ones(sum(lengths), dtype=np.int64)
    num_rows[placeholders] = grids[:, :3].prod(axis=1)
    assert len(grids) > 3
    found = grid_positions(np.array(lengths), np.array(placeholders), num_rows, grids)
    assert found.T.tolist() == [list(each) for each in expected]
    with pytest.raises(ValueError, match="have the grids"):
        grid_positions(np.array(lengths), np.array(placeholders), num_rows + 1, grids)
