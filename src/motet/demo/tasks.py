"""The four tasks: what is asked, with which media, and the answer.

``text``             number words in some language to digits; or which digit stands after (before) another in a string
``image``            the digits on one or several sheets, row by row
``speech``           the digits said in one or several clips
``spoken_question``  a sheet, and a clip that asks which digit on it stands after (before) another

Lengths have long tails in every modality, on purpose: most examples are short, a few have many rows, many sheets or
long clips, so that dealing examples out evenly by their number leaves ranks unevenly loaded. A spoken question
needs both media: without the clip any digit of the sheet may be meant, without the sheet the neighbour is unknown.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from motet.demo.images import MAX_COLUMNS, MAX_ROWS, Handwriting, Sheet, draw_sheet
from motet.demo.speech import RELATIONS, Utterance, Voice, ask_neighbour, say_digits

TASKS = ("text", "image", "speech", "spoken_question")
TASK_SHARES = (0.16, 0.24, 0.3, 0.3)
ROW_SEPARATOR = " "
MEDIA_SEPARATOR = " | "
_LONG_SHARE = 0.05

# Most prompts end with what is to be read: where it stands close to the answer, a small model learns to copy it within
# a few hundred steps; the others follow from there.
_USUAL_PROMPT_SHARE = 0.85
SPELLED_PROMPTS = ("Write as digits: {given}", "{given}: write as digits.")
IMAGE_PROMPTS = ("Read the digits: {given}", "{given} Read the digits.")
SPEECH_PROMPTS = ("Write what is said: {given}", "{given} Write what is said.")
QUESTION_PROMPTS = ("Answer: {given} {question}", "Answer {question} for {given}")


@dataclass(frozen=True)
class Example:
    """One example, its media still in memory, in the order of their placeholders in ``question``."""

    task: str
    question: str
    answer: str
    sheets: tuple[Sheet, ...] = ()
    utterances: tuple[Utterance, ...] = ()


@dataclass(frozen=True)
class Sources:
    """What one split may draw from: its handwriting, its voices, and a bounded set of clips of spoken digits."""

    hand: Handwriting
    voices: tuple[Voice, ...]
    spoken_digits: tuple[Utterance, ...]


def draw_example(task: str, sources: Sources, rng: random.Random) -> Example:
    """One example of ``task``; deterministic in ``rng``."""
    return _MAKERS[task](sources, rng)


def draw_spoken_digits(voices: tuple[Voice, ...], num_clips: int, rng: random.Random) -> tuple[Utterance, ...]:
    """``num_clips`` clips of mostly 1 to 3 and at most 16 digits, each by a random voice."""
    return tuple(say_digits(_digits(_length(rng, 1, 3, 16), rng), rng.choice(voices)) for _ in range(num_clips))


def read_sheets(sheets: tuple[tuple[str, ...], ...]) -> str:
    """The answer of the image task for the rows of each sheet."""
    return MEDIA_SEPARATOR.join(ROW_SEPARATOR.join(rows) for rows in sheets)


def neighbour(digits: str, relation: str, digit: str) -> str:
    """The digit after (before) ``digit``.

    Raises ValueError unless ``digit`` occurs just once and has that neighbour.
    """
    position = digits.index(digit) + (1 if relation == "after" else -1)
    if digits.count(digit) != 1 or not 0 <= position < len(digits):
        raise ValueError(f"{digits!r} has no single digit {relation} {digit!r}")
    return digits[position]


def _text_example(sources: Sources, rng: random.Random) -> Example:
    voice = rng.choice(sources.voices)
    if rng.random() < 0.5:
        said = say_digits(_digits(_length(rng, 1, 4, 24), rng), voice)
        return Example("text", _prompt(SPELLED_PROMPTS, rng, given=said.words), said.meaning)
    digits, relation, digit = _neighbour_problem(_length(rng, 4, 8, 64), rng)
    question = ask_neighbour(relation, digit, voice).words
    return Example(
        "text", _prompt(QUESTION_PROMPTS, rng, given=digits, question=question), neighbour(digits, relation, digit)
    )


def _image_example(sources: Sources, rng: random.Random) -> Example:
    num_sheets = rng.randint(2, 4) if rng.random() < _LONG_SHARE else 1
    sheets = tuple(_draw_random_sheet(sources.hand, rng) for _ in range(num_sheets))
    prompt = _prompt(IMAGE_PROMPTS, rng, given=" ".join(["<image>"] * num_sheets))
    return Example("image", prompt, read_sheets(tuple(sheet.rows for sheet in sheets)), sheets=sheets)


def _speech_example(sources: Sources, rng: random.Random) -> Example:
    num_clips = rng.randint(2, 3) if rng.random() < _LONG_SHARE else 1
    clips = tuple(rng.choice(sources.spoken_digits) for _ in range(num_clips))
    prompt = _prompt(SPEECH_PROMPTS, rng, given=" ".join(["<audio>"] * num_clips))
    return Example("speech", prompt, MEDIA_SEPARATOR.join(clip.meaning for clip in clips), utterances=clips)


def _question_example(sources: Sources, rng: random.Random) -> Example:
    rows, columns = rng.choice(((1, 5), (1, 5), (1, 6), (1, 7), (2, 3)))
    if rng.random() < _LONG_SHARE:
        rows, columns = rng.choice(((2, 6), (2, 8), (3, 5), (3, 8)))
    digits, relation, digit = _neighbour_problem(rows * columns, rng)
    sheet = draw_sheet(_split(digits, rows), sources.hand, rng)
    question = ask_neighbour(relation, digit, rng.choice(sources.voices))
    prompt = _prompt(QUESTION_PROMPTS, rng, given="<image>", question="<audio>")
    return Example("spoken_question", prompt, neighbour(digits, relation, digit), (sheet,), (question,))


_MAKERS: dict[str, Callable[[Sources, random.Random], Example]] = {
    "text": _text_example,
    "image": _image_example,
    "speech": _speech_example,
    "spoken_question": _question_example,
}


def _length(rng: random.Random, low: int, usual: int, high: int) -> int:
    """Mostly ``low`` to ``usual``; sometimes up to ``high``, the longer the rarer."""
    if rng.random() >= _LONG_SHARE:
        return rng.randint(low, usual)
    return round(usual * (high / usual) ** rng.random())


def _prompt(prompts: tuple[str, str], rng: random.Random, **parts: str) -> str:
    usual, unusual = prompts
    return (usual if rng.random() < _USUAL_PROMPT_SHARE else unusual).format(**parts)


def _draw_random_sheet(hand: Handwriting, rng: random.Random) -> Sheet:
    if rng.random() < _LONG_SHARE:
        rows, columns = rng.randint(2, MAX_ROWS), rng.randint(4, MAX_COLUMNS)
    elif rng.random() < 0.8:
        rows, columns = 1, rng.randint(1, 4)
    else:
        rows, columns = 2, rng.randint(1, 3)
    return draw_sheet(_split(_digits(rows * columns, rng), rows), hand, rng)


def _digits(count: int, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _neighbour_problem(count: int, rng: random.Random) -> tuple[str, str, str]:
    """``count`` digits, a relation, and a digit that occurs once among them and has a neighbour there."""
    position = rng.randrange(count)
    relation = rng.choice(RELATIONS) if 0 < position < count - 1 else ("after" if position == 0 else "before")
    digit = rng.choice("0123456789")
    others = "0123456789".replace(digit, "")
    digits = [rng.choice(others) for _ in range(count)]
    digits[position] = digit
    return "".join(digits), relation, digit


def _split(digits: str, num_rows: int) -> tuple[str, ...]:
    length = len(digits) // num_rows
    return tuple(digits[start : start + length] for start in range(0, len(digits), length))
