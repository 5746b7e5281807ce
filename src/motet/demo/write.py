"""Write the demonstration dataset: media files, manifests in the LLaVA conversation format, and a tokenizer.

This module decides the names of the files and the order of the random draws. Each split and purpose has a generator of
its own, seeded by ``seed``, so the same arguments write the same bytes for any number of worker processes.

    OUT/train.jsonl, OUT/heldout.jsonl   one example a line, media paths relative to the manifest
    OUT/images/*.png, OUT/audio/*.wav    examples that say the same in the same voice share a clip
    OUT/media.jsonl                      the content of each media file, and its handwriting or voice
    OUT/tokenizer/                       opens with transformers.AutoTokenizer.from_pretrained
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.demo.images import Sheet, load_handwriting
from motet.demo.speech import Utterance, synthesise_all, voices
from motet.demo.tasks import TASK_SHARES, TASKS, Example, Sources, draw_example, draw_spoken_digits
from motet.demo.tokenizer import write_tokenizer

# Synthesis is most of the cost, so examples share clips. More training clips than this do not improve training.
_MAX_SPOKEN_CLIPS = 1800

WriteProgress = Callable[[str, int, int], None]


def write_demo_data(
    out: Path,
    *,
    num_train: int,
    num_heldout: int,
    seed: int = 0,
    progress: WriteProgress | None = None,
    num_workers: int | None = None,
) -> None:
    """Write the dataset into the folder ``out``; create it, or overwrite its files.

    num_train, num_heldout: examples of each split, at least 1. The splits share no handwriting, no voice and no media
        file.
    progress: called with what is counted (``"examples"`` or ``"clips"``), the number done, and the number in all.
    num_workers: processes that synthesise speech; 0: this process; None: one for each core, at most 4.
    Raises UserError for numbers below 1, if ``out`` cannot be a folder, and without scikit-learn or ttspico.
    CPU time: about 1 ms an example, and 10 ms for each of at most about 3000 clips.
    """
    if num_train < 1 or num_heldout < 1:
        raise UserError(f"num_train and num_heldout must be at least 1, got {num_train} and {num_heldout}")
    if num_workers is None:
        num_workers = min(4, os.cpu_count() or 1)
    report = progress or (lambda counted, done, total: None)
    for folder in ("images", "audio"):
        try:
            (out / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{out} cannot be made, or written into: {error.strerror}; name a folder.") from error

    handwriting = load_handwriting()
    contents: list[dict[str, Any]] = []
    names: dict[Utterance, str] = {}
    corpus: list[str] = []
    # 1. Draw the examples of each split, write their images and manifest, and name their clips.
    num_drawn, num_examples = 0, num_train + num_heldout
    for split, count in (("train", num_train), ("heldout", num_heldout)):
        sources = _sources(split, count, handwriting, seed)
        rng = random.Random(f"examples/{split}/{seed}")
        lines = []
        for index in range(count):
            task = rng.choices(TASKS, TASK_SHARES)[0] if split == "train" else TASKS[index % len(TASKS)]
            example = draw_example(task, sources, rng)
            images = [
                _write_sheet(out, f"{split}-{index:06d}-{position}", sheet, split, contents)
                for position, sheet in enumerate(example.sheets)
            ]
            audios = [names.setdefault(said, f"audio/{split}-{len(names):05d}.wav") for said in example.utterances]
            lines.append(_record(f"{split}-{index:06d}", example, images, audios))
            if split == "train":
                corpus.append(example.question)
            num_drawn += 1
            if num_drawn % 100 == 0 or num_drawn == num_examples:
                report("examples", num_drawn, num_examples)
        write_jsonl(out / f"{split}.jsonl", lines)
    # 2. Synthesise and write the clips.
    _write_clips(out, names, num_workers, report, contents)
    # 3. Write the contents of all media files, and the tokenizer.
    write_jsonl(out / "media.jsonl", contents)
    write_tokenizer(out / "tokenizer", corpus)


def _sources(split: str, num_examples: int, handwriting: dict[str, Any], seed: int) -> Sources:
    """The sources of a split of so many examples."""
    num_clips = max(1, min(_MAX_SPOKEN_CLIPS, round(num_examples * TASK_SHARES[TASKS.index("speech")])))
    split_voices = voices(split)
    spoken_digits = draw_spoken_digits(split_voices, num_clips, random.Random(f"clips/{split}/{seed}"))
    return Sources(handwriting[split], split_voices, spoken_digits)


def _write_sheet(out: Path, name: str, sheet: Sheet, split: str, contents: list[dict[str, Any]]) -> str:
    """Write the image of a sheet and add it to ``contents``; returns its path in ``out``."""
    path = f"images/{name}.png"
    (out / path).write_bytes(sheet.png)
    contents.append({"path": path, "split": split, "rows": list(sheet.rows), "instances": list(sheet.instances)})
    return path


def _write_clips(
    out: Path, names: dict[Utterance, str], num_workers: int, report: WriteProgress, contents: list[dict[str, Any]]
) -> None:
    """Synthesise the utterances, write them under their names, and add them to ``contents``."""
    num_done = 0

    def count_clip() -> None:
        nonlocal num_done
        num_done += 1
        if num_done % 50 == 0 or num_done == len(names):
            report("clips", num_done, len(names))

    for utterance, wav in synthesise_all(names, num_workers, count_clip):
        path = names[utterance]
        (out / path).write_bytes(wav)
        voice = utterance.voice
        contents.append(
            {
                "path": path,
                "split": Path(path).name.split("-")[0],
                "language": voice.language,
                "rate": voice.rate,
                "pitch": voice.pitch,
                "words": utterance.words,
                "meaning": utterance.meaning,
            }
        )


def _record(name: str, example: Example, images: list[str], audios: list[str]) -> dict[str, Any]:
    """The line of an example in a manifest."""
    record: dict[str, Any] = {"id": name, "task": example.task}
    for singular, plural, paths in (("image", "images", images), ("audio", "audios", audios)):
        if len(paths) == 1:
            record[singular] = paths[0]
        elif paths:
            record[plural] = paths
    record["conversations"] = [
        {"from": "human", "value": example.question},
        {"from": "gpt", "value": example.answer},
    ]
    return record


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a record a line."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(text, encoding="utf-8", newline="\n")
