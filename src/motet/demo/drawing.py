"""The dataset of `make demo-generate`: prompts in words or in speech that ask for a digit, and its handwriting.

    {"audio": "audio/train-00012.wav", "image": "digits/0841.png", "conversations": [
        {"from": "human", "value": "Please draw <audio> again"}, {"from": "gpt", "value": "<image>7"}]}

The digit's name stands behind the picture, so that what makes the picture does not see it; the backbone learns from it
what was asked for. A prompt names the digit by a figure, by its word in English or German, or in speech. The words
around it, the voices and the handwriting of the held-out split are in no training example. It does not import torch.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from motet.core.errors import UserError
from motet.demo.images import Handwriting, load_handwriting
from motet.demo.speech import NUMBER_WORDS, Utterance, say_digits, synthesise_all, voices
from motet.demo.tokenizer import write_tokenizer
from motet.demo.write import write_jsonl

_KINDS = ("text", "speech")
_SPEECH_SHARE = 0.5
_WORDS = {
    "train": """
        draw write show make give print put form trace render please now again here me a the with for us quick slow
        small large this that it next good fine you can will on page line ink pen black plain just then once more by
        hand""",
    "heldout": """
        sketch paint scribble produce pencil kindly today everyone another some drawing beautiful figure careful wish
        want like let see look paper quill brush""",
}
_MOST_BEFORE, _MOST_AFTER = 3, 2
"""Words around the digit's name in a prompt."""


def write_drawing_data(out: Path, *, num_train: int, num_heldout: int, seed: int = 0, num_workers: int = 0) -> None:
    """Write manifests, `digits/`, `audio/` and a tokenizer into the folder `out`; equal arguments write equal bytes.

    num_train, num_heldout: examples, at least 1. Held-out digits and kinds of prompts take turns, so that there are
    equally many of each. num_workers: as of `synthesise_all`.
    Raises UserError for numbers below 1, if `out` cannot be a folder, and without scikit-learn or ttspico.
    """
    if num_train < 1 or num_heldout < 1:
        raise UserError(f"num_train and num_heldout must be at least 1, got {num_train} and {num_heldout}")
    for folder in ("digits", "audio"):
        try:
            (out / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{out} cannot be made, or written into: {error.strerror}; name a folder.") from error
    handwriting = load_handwriting()
    clips: dict[Utterance, str] = {}
    prompts: list[str] = []
    used: set[int] = set()
    for split, count in (("train", num_train), ("heldout", num_heldout)):
        rng = random.Random(f"drawing/{split}/{seed}")
        records = [_record(split, number, handwriting[split], clips, used, rng) for number in range(count)]
        write_jsonl(out / f"{split}.jsonl", records)
        prompts += [record["conversations"][0]["value"] for record in records if split == "train"]
    for number in sorted(used):
        (out / _digit_file(number)).write_bytes(_png(handwriting["train"].pixels[number]))
    for utterance, wav in synthesise_all(clips, num_workers, lambda: None):
        (out / clips[utterance]).write_bytes(wav)
    write_tokenizer(out / "tokenizer", prompts)


def _record(
    split: str,
    number: int,
    handwriting: Handwriting,
    clips: dict[Utterance, str],
    used: set[int],
    rng: random.Random,
) -> dict[str, Any]:
    """An example. clips, used: files of utterances, and instances of digits, to which it adds its own."""
    if split == "train":
        digit, kind = rng.randrange(10), _KINDS[rng.random() < _SPEECH_SHARE]
    else:
        digit, kind = number // len(_KINDS) % 10, _KINDS[number % len(_KINDS)]
    record: dict[str, Any] = {"id": f"{split}-{number:06d}", "task": kind, "digit": digit}
    if kind == "speech":
        said = say_digits(str(digit), rng.choice(voices(split)))
        record["audio"] = clips.setdefault(said, f"audio/{split}-{len(clips):05d}.wav")
        name = "<audio>"
    else:
        name = rng.choice([str(digit), *(NUMBER_WORDS[language][digit] for language in ("en-GB", "de-DE"))])
    words = _WORDS[split].split()
    before, after = (rng.choices(words, k=rng.randint(0, most)) for most in (_MOST_BEFORE, _MOST_AFTER))
    instance = rng.choice(handwriting.instances[digit])
    used.add(instance)
    record["image"] = _digit_file(instance)
    record["conversations"] = [
        {"from": "human", "value": " ".join([*before, name, *after])},
        {"from": "gpt", "value": f"<image>{digit}"},
    ]
    return record


def _digit_file(number: int) -> str:
    return f"digits/{number:04d}.png"


def _png(ink: np.ndarray) -> bytes:
    """Ink of 0 to 1 on white paper, an 8-bit grey PNG."""
    stream = io.BytesIO()
    Image.fromarray(np.rint(255 * (1 - ink)).astype(np.uint8)).save(stream, format="PNG")
    return stream.getvalue()
