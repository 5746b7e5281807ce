"""3-D points as a modality of one's own: all that Motet is told of it. Files are PLY, binary, with x, y and z.

Only processes that read files import this, so it must not import torch: `point_encoder.py` does.
"""

import re

import numpy as np

ROW_DIM = 3
SUFFIXES = (".ply",)


def read_header(file):
    """The number of an item's rows. Motet balances by it, before anything is decoded."""
    found = re.search(rb"element vertex (\d+)\n", _head(file))
    if found is None:
        raise ValueError("names no vertices in its header")
    return int(found[1])


def load(file):
    """The points, float32 [num_points, 3], in a ball around the origin."""
    _head(file)
    points = np.frombuffer(file.read(), "<f4").reshape(-1, 3)
    centred = points - points.mean(axis=0)
    return centred / np.linalg.norm(centred, axis=1).max()


def _head(file):
    """The text before the points. The file then stands at the first of them."""
    lines = [file.readline()]
    while lines[-1] != b"end_header\n":
        lines.append(file.readline())
        if not lines[-1]:
            raise ValueError("is no PLY file: its header has no end")
    return b"".join(lines)
