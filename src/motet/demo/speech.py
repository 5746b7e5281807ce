"""Spoken digits and spoken questions, synthesised by ttspico in several languages and voices.

This module decides the languages, their words, and the voices (rate and pitch) of each split, and turns an utterance
into the bytes of a WAV file. No training voice has the rate or the pitch of a held-out voice. Most held-out values lie
between those of training, some outside.
"""

from __future__ import annotations

import io
import multiprocessing
import wave
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from motet.core.errors import UserError

SAMPLE_RATE = 16_000
_SILENCE = 200
QUESTIONS = ("first", "last", "largest", "smallest")

NUMBER_WORDS: dict[str, tuple[str, ...]] = {
    "en-GB": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "en-US": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "de-DE": ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
}
_QUESTION_WORDS: dict[str, tuple[str, ...]] = {
    "en-GB": QUESTIONS,
    "en-US": QUESTIONS,
    "de-DE": ("erste", "letzte", "größte", "kleinste"),
}
LANGUAGES = tuple(NUMBER_WORDS)

# (rate, pitch), in percent of the engine's usual voice.
_VOICES: dict[str, tuple[tuple[int, int], ...]] = {
    "train": tuple((rate, pitch) for rate in (110, 130, 150, 170) for pitch in (70, 100, 130)),
    "heldout": tuple((rate, pitch) for rate in (120, 140, 160) for pitch in (85, 115)) + ((105, 65), (178, 136)),
}


@dataclass(frozen=True, order=True)
class Voice:
    """A language and a way to speak it: rate and pitch in percent of the engine's usual ones."""

    language: str
    rate: int
    pitch: int


@dataclass(frozen=True, order=True)
class Utterance:
    """Words, the voice that says them, and their meaning: digits (``"371"``), or one of ``QUESTIONS``."""

    voice: Voice
    words: str
    meaning: str


def voices(split: str, languages: tuple[str, ...] = LANGUAGES) -> tuple[Voice, ...]:
    """The voices of ``train`` or ``heldout``; the two share no rate and no pitch."""
    return tuple(Voice(language, rate, pitch) for language in languages for rate, pitch in _VOICES[split])


def spell_digits(digits: str, language: str) -> str:
    """``"371"`` as the words ``"three seven one"`` of ``language``."""
    return " ".join(NUMBER_WORDS[language][int(digit)] for digit in digits)


def say_digits(digits: str, voice: Voice) -> Utterance:
    """The utterance of digits, one by one."""
    return Utterance(voice, spell_digits(digits, voice.language), digits)


def ask(question: str, voice: Voice) -> Utterance:
    """The utterance of one of ``QUESTIONS``, in the language of the voice."""
    return Utterance(voice, _QUESTION_WORDS[voice.language][QUESTIONS.index(question)], question)


def synthesise(utterance: Utterance) -> bytes:
    """The bytes of a mono 16-bit WAV file at 16 kHz; equal utterances give equal bytes, in any process and order.

    Raises UserError without ttspico, and RuntimeError if it returns no sound.
    """
    # Imported here, so that the rest of the package can be imported without the engine.
    try:
        import ttspico
    except ImportError as error:
        raise UserError("Speech needs ttspico; install it with: pip install 'motet[demo]'.") from error

    # A new engine for each utterance: the output of a used one depends on what it said before.
    engine = ttspico.TtsEngine(utterance.voice.language)
    engine.rate = utterance.voice.rate
    engine.pitch = utterance.voice.pitch
    spoken = engine.speak(utterance.words)
    if not spoken:
        raise RuntimeError(f"ttspico said nothing for {utterance.words!r} in {utterance.voice.language}")
    samples = _without_trailing_silence(np.frombuffer(spoken, dtype="<i2"))
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.tobytes())
    return stream.getvalue()


def _without_trailing_silence(samples: np.ndarray) -> np.ndarray:
    """Samples without the 1/7 s of silence that the engine adds to each clip: a large part of a short clip."""
    audible = np.flatnonzero(np.abs(samples.astype(np.int32)) > _SILENCE)
    return samples[: int(audible[-1]) + SAMPLE_RATE // 50] if len(audible) else samples


def synthesise_all(
    utterances: Iterable[Utterance], num_workers: int, on_clip: Callable[[], None]
) -> Iterator[tuple[Utterance, bytes]]:
    """Each utterance with its WAV bytes, in the given order.

    ``num_workers``: number of processes; 0 is this process. ``on_clip`` is called after each clip.
    It takes about 8 ms of CPU time for a second of speech.
    """
    ordered = list(utterances)
    if num_workers == 0 or not ordered:
        for utterance in ordered:
            yield utterance, synthesise(utterance)
            on_clip()
        return
    # Spawn, not fork, because the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=num_workers, mp_context=context) as pool:
        for utterance, wav in zip(ordered, pool.map(synthesise, ordered, chunksize=16), strict=True):
            yield utterance, wav
            on_clip()
