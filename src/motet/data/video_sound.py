"""The sound of a video: a clip that lies in the video's own file, as an item beside it, by PyAV.

How many samples it has is what the container says; one that does not say it (Matroska, WebM) has its packets counted
while a manifest is indexed, without decoding them. What a decoder gives more is left out, and what it gives less, up to
a few packets, is silence: coders begin and end with some of it. The stream is the one that FFmpeg takes for the best.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from motet.core.arrays import Float32Array
from motet.data.clip_bounds import check_clip, check_finite
from motet.data.media import MediaRef, Unusable, check_unchanged
from motet.data.videos import open_container

_STORED_BITS = re.compile(r"pcm_[fsu](\d+)")
"""The name of a codec that stores samples as they are."""
_MIN_SECONDS = 0.05
"""Shorter sound may become no row of an encoder."""
_SLACK_SECONDS = 0.2
"""What a decoder may give less than the container says: a few packets."""


def read_sound_header(ref: MediaRef) -> tuple[int, int]:
    """(samples, sampling rate) of the sound of a video. Raises Unusable, and UserError without PyAV."""
    with _opened_sound(ref) as (_, _, _, raw):
        return raw


def read_video_sound(ref: MediaRef, max_samples: Callable[[int], int]) -> tuple[Float32Array, int]:
    """Samples with channels averaged, float32 [num_samples], and their rate. Raises Unusable.

    max_samples: sampling rate -> how many are wanted at most.
    """
    with _opened_sound(ref) as (av, container, stream, (num_samples, rate)):
        wanted, blocks, done = min(num_samples, max_samples(rate)), list[Float32Array](), 0
        try:
            for block in _blocks(av, container, stream):
                check_finite(block, done, rate)
                blocks.append(block)
                done += len(block)
                if done >= wanted:
                    break
        except av.error.FFmpegError as error:
            raise Unusable(
                f"is damaged: its sound cannot be decoded from {done / rate:.3f} s ({error.strerror})"
            ) from None
    if wanted - done > _SLACK_SECONDS * rate:
        raise Unusable(f"is cut off or damaged: it holds {done:,} of {num_samples:,} samples of its sound")
    samples = np.concatenate([*blocks, np.zeros(max(wanted - done, 0), dtype=np.float32)])
    return samples[:wanted], rate


@contextmanager
def _opened_sound(ref: MediaRef) -> Iterator[tuple[Any, Any, Any, tuple[int, int]]]:
    """PyAV, a container, its sound, and (samples, sampling rate), which passed the checks. Raises Unusable."""
    if ref.is_held_list:
        raise Unusable("lists frames, which have no sound")
    with open_container(ref) as (av, container):
        stream = container.streams.best("audio")
        if stream is None:
            raise Unusable("has no sound, which model.video.sound reads with its frames")
        rate = int(stream.rate or 0)
        # Matroska counts in milliseconds, which are too coarse.
        if stream.duration is not None and stream.time_base * rate <= 1:
            num_samples = round(stream.duration * stream.time_base * rate)
        elif ref.raw is not None and ref.raw[1] == rate:
            num_samples = ref.raw[0]
        else:
            num_samples = _counted(container, stream, rate)
        check_clip(num_samples, rate, stream.channels)
        if num_samples < _MIN_SECONDS * rate:
            raise Unusable(f"has {num_samples / rate:.3g} s of sound, less than {_MIN_SECONDS:g} s")
        check_unchanged(ref, (num_samples, rate), "{:,} samples of sound at {:,} Hz")
        yield av, container, stream, (num_samples, rate)


def _counted(container: Any, stream: Any, rate: int) -> int:
    """Samples of all packets, which are read and not decoded: by their bytes, their number, or their times."""
    codec = stream.codec_context
    packets = [(packet.size, packet.duration or 0) for packet in container.demux(stream) if packet.size]
    container.seek(0)
    sizes, durations = np.array(packets, dtype=np.int64).reshape(-1, 2).sum(axis=0).tolist()
    if stored := _STORED_BITS.match(codec.name):
        return int(8 * sizes // (int(stored.group(1)) * codec.channels))
    return len(packets) * codec.frame_size if codec.frame_size else round(durations * stream.time_base * rate)


def _blocks(av: Any, container: Any, stream: Any) -> Iterator[Float32Array]:
    """The samples in blocks, channels averaged, float32 [num_samples] each."""
    to_floats = av.AudioResampler(format="fltp")
    for frame in container.decode(stream):
        if frame.is_corrupt:
            raise Unusable("is damaged: its sound cannot be decoded whole")
        yield from (each.to_ndarray().mean(axis=0) for each in to_floats.resample(frame))
    yield from (each.to_ndarray().mean(axis=0) for each in to_floats.resample(None))
