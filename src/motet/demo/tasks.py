"""The four tasks: the question, its media and the answer.

``text``             read digits or number words; or say which digit of a string is first, last, largest, smallest
``image``            read the digits on one or several sheets, row by row; or say which digit of a sheet is first, ...
``speech``           read the digits that one or several clips say
``spoken_question``  say which digit of a sheet is first, last, largest or smallest, as a clip asks

There are two operations, read and answer, and all modalities share their prompts. So a small model learns the
operations on cheap text, and from images and speech only the names of digits. For the same reason, most prompts end
with the digits, and ``DISTINCT`` consecutive digits differ, so that a digit determines what follows it. A spoken
question needs both media: without the clip, any of four digits of the sheet may be asked for; without the sheet, no
digit is known.

Lengths have long tails in every modality, on purpose: most examples are short, a few have many rows, many sheets or
long clips, so that dealing examples out evenly by their number leaves ranks unevenly loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from motet.demo.images import MAX_COLUMNS, MAX_ROWS, Handwriting, Sheet, draw_sheet
from motet.demo.speech import LANGUAGES, QUESTIONS, Utterance, Voice, ask, say_digits, spell_digits

TASKS = ("text", "image", "speech", "spoken_question")
# Shares of the training split. The held-out split has equally many of each task, so that each is measured well.
TASK_SHARES = (0.42, 0.18, 0.22, 0.18)
DISTINCT = 8
_LONG_SHARE = 0.05

_USUAL_PROMPT_SHARE = 0.9
READ_PROMPTS = ("Read: {content}", "{content} Read.")
QUESTION_PROMPTS = ("Answer: {content} {question}", "{content} Answer: {question}")


@dataclass(frozen=True)
class Example:
    """One example. Its media are in memory, in the order of their placeholders in ``question``."""

    task: str
    question: str
    answer: str
    sheets: tuple[Sheet, ...] = ()
    utterances: tuple[Utterance, ...] = ()


@dataclass(frozen=True)
class Sources:
    """What one split draws from: its handwriting, its voices, and a limited set of clips of spoken digits."""

    handwriting: Handwriting
    voices: tuple[Voice, ...]
    spoken_digits: tuple[Utterance, ...]


def draw_example(task: str, sources: Sources, rng: random.Random) -> Example:
    """One example of ``task``; deterministic in ``rng``."""
    return _MAKERS[task](sources, rng)


def draw_spoken_digits(voices: tuple[Voice, ...], num_clips: int, rng: random.Random) -> tuple[Utterance, ...]:
    """``num_clips`` clips of 1 to 16 digits, mostly 1 or 2, each by a random voice."""
    return tuple(say_digits(_digits(_length(rng, 1, 2, 16), rng), rng.choice(voices)) for _ in range(num_clips))


def read_sheets(sheets: tuple[tuple[str, ...], ...]) -> str:
    """The answer of the image task for the rows of each sheet."""
    return "".join("".join(rows) for rows in sheets)


def answer_question(digits: str, question: str) -> str:
    """The digit that ``question``, one of ``QUESTIONS``, asks for."""
    return {"first": digits[0], "last": digits[-1], "largest": max(digits), "smallest": min(digits)}[question]


def _text_example(sources: Sources, rng: random.Random) -> Example:
    kind = rng.random()
    if kind < 0.6:
        digits = _digits(_length(rng, 1, 6, 24), rng)
        content = digits if kind < 0.4 else spell_digits(digits, rng.choice(LANGUAGES))
        return Example("text", _prompt(READ_PROMPTS, rng, content=content), digits)
    digits, question = _digits(_length(rng, 3, 6, 64), rng), rng.choice(QUESTIONS)
    prompt = _prompt(QUESTION_PROMPTS, rng, content=digits, question=question)
    return Example("text", prompt, answer_question(digits, question))


def _image_example(sources: Sources, rng: random.Random) -> Example:
    if rng.random() < 0.5:
        sheet, question = _draw_question(sources, rng)
        prompt = _prompt(QUESTION_PROMPTS, rng, content="<image>", question=question)
        return Example("image", prompt, answer_question("".join(sheet.rows), question), (sheet,))
    num_sheets = rng.randint(2, 4) if rng.random() < _LONG_SHARE else 1
    sheets = tuple(
        draw_sheet(_split(_digits(rows * columns, rng), rows), sources.handwriting, rng)
        for rows, columns in (_sheet_shape(rng) for _ in range(num_sheets))
    )
    prompt = _prompt(READ_PROMPTS, rng, content=" ".join(["<image>"] * num_sheets))
    return Example("image", prompt, read_sheets(tuple(sheet.rows for sheet in sheets)), sheets=sheets)


def _speech_example(sources: Sources, rng: random.Random) -> Example:
    num_clips = rng.randint(2, 3) if rng.random() < _LONG_SHARE else 1
    clips = tuple(rng.choice(sources.spoken_digits) for _ in range(num_clips))
    prompt = _prompt(READ_PROMPTS, rng, content=" ".join(["<audio>"] * num_clips))
    return Example("speech", prompt, "".join(clip.meaning for clip in clips), utterances=clips)


def _question_example(sources: Sources, rng: random.Random) -> Example:
    sheet, question = _draw_question(sources, rng)
    clip = ask(question, rng.choice(sources.voices))
    prompt = _prompt(QUESTION_PROMPTS, rng, content="<image>", question="<audio>")
    return Example("spoken_question", prompt, answer_question("".join(sheet.rows), question), (sheet,), (clip,))


_MAKERS: dict[str, Callable[[Sources, random.Random], Example]] = {
    "text": _text_example,
    "image": _image_example,
    "speech": _speech_example,
    "spoken_question": _question_example,
}


def _prompt(prompts: tuple[str, str], rng: random.Random, **parts: str) -> str:
    usual, unusual = prompts
    return (usual if rng.random() < _USUAL_PROMPT_SHARE else unusual).format(**parts)


def _length(rng: random.Random, low: int, usual: int, high: int) -> int:
    """A random length: mostly from ``low`` to ``usual``, sometimes up to ``high``; longer ones are rarer."""
    if rng.random() >= _LONG_SHARE:
        return rng.randint(low, usual)
    return round(usual * (high / usual) ** rng.random())


def _sheet_shape(rng: random.Random) -> tuple[int, int]:
    if rng.random() < _LONG_SHARE:
        return rng.randint(2, MAX_ROWS), rng.randint(4, MAX_COLUMNS)
    return (1, rng.randint(1, 4)) if rng.random() < 0.85 else (2, rng.randint(1, 2))


def _digits(count: int, rng: random.Random) -> str:
    """Random digits; any ``DISTINCT`` consecutive ones differ."""
    digits = ""
    for _ in range(count):
        digits += rng.choice([digit for digit in "0123456789" if digit not in digits[-(DISTINCT - 1) :]])
    return digits


def _draw_question(sources: Sources, rng: random.Random) -> tuple[Sheet, str]:
    """A random sheet and a random question about it."""
    rows, columns = rng.choice(((1, 3), (1, 4), (1, 5), (2, 2), (2, 3)))
    if rng.random() < _LONG_SHARE:
        rows, columns = rng.choice(((2, 4), (1, 8), (2, 5), (3, 3)))
    sheet = draw_sheet(_split(_digits(rows * columns, rng), rows), sources.handwriting, rng)
    return sheet, rng.choice(QUESTIONS)


def _split(digits: str, num_rows: int) -> tuple[str, ...]:
    length = len(digits) // num_rows
    return tuple(digits[start : start + length] for start in range(0, len(digits), length))
