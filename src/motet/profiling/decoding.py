"""Decoding timed on this machine: files of the recipe's own data, by phase and codec."""

from __future__ import annotations

import time

import numpy as np

from motet.cost.profile import DecodingTimes
from motet.data.decode import Decoder
from motet.data.examples import Examples, files_by_codec
from motet.data.media import BadMedia, MediaRef
from motet.data.videos import amount_of

_NUM_EXAMPLES = 1024
"""So many examples tell a job's media."""
_NUM_FILES = 12
"""Files of each phase and codec that are timed, from the smallest to the largest."""
_REPEATS, _AT_ONCE = 3, 4
_MAX_S = 10.0
"""The most seconds for files of one phase and codec."""


def measure_decoding(dataset: Examples, decoder: Decoder) -> list[DecodingTimes]:
    """Seconds of a worker for files of each phase and codec, with the way to this process. Bad files are passed over.

    decoder: with one worker. The least of several times counts: how fast a disk is, is not measured.
    """
    found = files_by_codec(dataset, _NUM_EXAMPLES)
    measured = []
    for (phase, codec), refs in sorted(found.items()):
        refs.sort(key=amount_of)
        chosen = np.unique(np.linspace(0, len(refs) - 1, _NUM_FILES).round().astype(np.int64))
        start_s = time.perf_counter()
        points = []
        for place in chosen.tolist():
            if (seconds := decode_seconds(decoder, refs[place], phase)) is not None:
                points.append((amount_of(refs[place]), seconds))
            if time.perf_counter() - start_s > _MAX_S:
                break
        if points:
            amounts, times = zip(*points, strict=True)
            measured.append(DecodingTimes(phase=phase, codec=codec, amounts=amounts, seconds=times))
    return measured


def decode_seconds(decoder: Decoder, ref: MediaRef, phase: str) -> float | None:
    """Seconds of a decoder with one worker for a file, the least of several times; None if it cannot be used.

    Several wait for the worker at once, as in training: what passes until an idle one begins does not count.
    """
    seconds = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        loaded = decoder.load([ref] * _AT_ONCE, [(phase,)] * _AT_ONCE)
        seconds.append((time.perf_counter() - begun_s) / _AT_ONCE)
        if any(isinstance(each, BadMedia) for each in loaded):
            return None
    return min(seconds)
