"""A video and its sound in one text: frames and rows of sound alternate in chunks of time (Qwen2.5-Omni, section 2.2).

Both begin at 0. In each chunk stand the frames whose time is in it, and then the rows of sound. A frame is a piece of
the video's item, and a row is one of the sound's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.example import TokenSequence, moved_turns
from motet.core.grid_positions import FRAME_AT, ROW_AT


def alternating(sequence: TokenSequence, videos: Sequence[int], chunk: int) -> TokenSequence:
    """A sequence in which the frames of some items alternate with the rows of the item behind each, its sound.

    sequence: each item has one placeholder, a sound's is the next token behind its video's. Items have grids: a video
              with the step of its frames, a sound with as many frames as rows.
    videos:   the numbers of these items. chunk: positions of a chunk, at least the step of frames.

    Example:
        Two frames, two positions apart, and three rows, in chunks of two positions:
        >>> from motet.core.grid_positions import AS_TEXT, BEHIND_LARGEST, step_bits
        >>> (step,) = step_bits(np.float32([2])).tolist()
        >>> grids = np.array([[2, 1, 1, step, BEHIND_LARGEST], [3, 1, 1, 0, AS_TEXT]])
        >>> tokens, places = np.array([7, 7, 0, 1, 8, 8]), np.array([2, 3])
        >>> text = TokenSequence(tokens, np.zeros(6, bool), ("image", "audio"), places, grids)
        >>> alternating(text, [0], chunk=2).tokens.tolist()
        [7, 7, 0, 1, 1, 0, 1, 8, 8]
    """
    if sequence.grids is None or sequence.pieces is not None:
        raise ValueError("items that alternate have grids, and no pieces yet")
    times: dict[int, Int64Array] = {}
    for video in videos:
        num_frames, step = sequence.grids[video, 0], sequence.grids[video, 3:4].astype(np.int32).view(np.float32)
        # Rounded as transformers rounds them.
        times[video] = (np.arange(num_frames).astype(np.float32) * step).astype(np.int64)
        times[video + 1] = np.arange(sequence.grids[video + 1, 0])
    repeats = np.ones(len(sequence.tokens), dtype=np.int64)
    repeats[sequence.media_positions[list(times)]] = [len(each) for each in times.values()]
    starts = (np.cumsum(repeats) - repeats)[sequence.media_positions]
    tokens, targets = np.repeat(sequence.tokens, repeats), np.repeat(sequence.targets, repeats)
    places, grids = list(starts[:, None]), list(sequence.grids[:, None])
    for video in videos:
        pair = (times[video] // chunk, times[video + 1] // chunk)
        order = np.argsort(np.concatenate([2 * pair[0], 2 * pair[1] + 1]), kind="stable")
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        places[video : video + 2] = np.split(starts[video] + rank, [len(pair[0])])
        for item, kind in ((video, FRAME_AT), (video + 1, ROW_AT)):
            tokens[places[item]] = sequence.tokens[sequence.media_positions[item]]
            targets[places[item]] = False
            grids[item] = np.repeat(grids[item], len(times[item]), axis=0)
            grids[item][:, 0], grids[item][:, 3], grids[item][:, 4] = 1, times[item], kind
    return replace(
        sequence,
        tokens=tokens,
        targets=targets,
        media_positions=np.concatenate(places),
        grids=np.concatenate(grids),
        pieces=np.array([len(each) for each in places], dtype=np.int64),
        turns=moved_turns(sequence.turns, repeats),
    )
