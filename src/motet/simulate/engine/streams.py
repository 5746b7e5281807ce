"""The streams of a program rank, each of which runs its actions one after the other, in the order of the rank's list.

compute holds passes and optimizer steps; send and receive the two ends of a P2P move, which take place at once;
collective the exchanges, gathers, reductions and the norm, which take place at once on all ranks of a group; tensor the
tensor-parallel communication of a pass.
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


OF_KIND: Int32Array = np.array([_stream_of(kind) for kind in KINDS], dtype=np.int32)
"""The stream of each kind of KINDS; a part of a pass may be TENSOR instead."""


def holds_compute(stream: Int32Array) -> BoolArray:
    """Whether an action holds the compute stream of a rank whose communication blocks, as all of a pass does."""
    held: BoolArray = (stream == COMPUTE) | (stream == TENSOR)
    return held
