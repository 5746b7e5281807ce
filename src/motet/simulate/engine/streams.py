"""The streams of a program rank. Each runs its actions one after the other, in the order of the rank's row.

- compute: passes and optimizer steps;
- send, receive: the two ends of a transfer, which take place at the same time;
- collective: exchanges, gathers, reductions and NORM, which take place at the same time on all ranks of a group;
- tensor: tensor-parallel communication of passes.
"""

from __future__ import annotations

import numpy as np

from motet.core import timeline
from motet.core.arrays import BoolArray, Int32Array
from motet.schedule.program import COMPUTE_KINDS, Kind
from motet.simulate.engine.table import KINDS

STREAMS = (timeline.COMPUTE_STREAM, "send", "receive", "collective", "tensor")
COMPUTE, SEND, RECEIVE, COLLECTIVE, TENSOR = range(len(STREAMS))


def _stream_of(kind: Kind) -> int:
    match kind:
        case Kind.SEND_F | Kind.SEND_B:
            return SEND
        case Kind.RECV_F | Kind.RECV_B:
            return RECEIVE
    return COMPUTE if kind in COMPUTE_KINDS else COLLECTIVE


STREAM_OF_KIND: Int32Array = np.array([_stream_of(kind) for kind in KINDS], dtype=np.int32)
"""The stream of each kind in KINDS. A part of a pass may be on TENSOR instead."""


def holds_compute(stream: Int32Array) -> BoolArray:
    """Whether actions are on the compute stream of a rank whose communication blocks: all parts of passes are."""
    held: BoolArray = (stream == COMPUTE) | (stream == TENSOR)
    return held
