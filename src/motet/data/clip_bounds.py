"""What sound may be, by its header and its samples, whatever file it lies in."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Float32Array
from motet.data.media import Unusable

MIN_RATE, MAX_RATE = 1_000, 768_000
"""The bounds of a clip's sampling rate in Hz. Below there is no speech; above, no converter records."""
MAX_CHANNELS = 64
"""The most channels of a clip, as in seventh-order ambisonics."""
MAX_SECONDS = 86_400
"""The longest clip: a day. A header with more is damaged, or the file is no example."""


def check_clip(num_samples: int, rate: int, channels: int) -> None:
    """Raise Unusable for sound that is beyond a bound."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise Unusable(f"has a sampling rate of {rate:,} Hz, not from {MIN_RATE:,} to {MAX_RATE:,}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise Unusable(f"has {channels:,} channels, more than {MAX_CHANNELS}")
    if num_samples < 1:
        raise Unusable("is empty: no samples")
    if num_samples > MAX_SECONDS * rate:
        raise Unusable(f"lasts {num_samples / rate:,.0f} s by its header, more than {MAX_SECONDS:,}")


def check_finite(block: Float32Array, done: int, rate: int) -> None:
    """Raise Unusable for a block with a sample that is not finite. done: samples before it."""
    if not np.isfinite(block).all():
        at = done + int(np.flatnonzero(~np.isfinite(block))[0])
        raise Unusable(f"holds samples that are not finite, the first at {at / rate:.3f} s")
