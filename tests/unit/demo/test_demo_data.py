"""The demonstration dataset: same seed, same bytes; splits that share nothing; answers that follow from the media."""

from __future__ import annotations

import hashlib
import json
import random
import wave
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("ttspico")

from PIL import Image

from motet.core.errors import UserError
from motet.demo import write_demo_data
from motet.demo.images import CELL_PIXELS, draw_sheet, load_handwriting
from motet.demo.speech import NUMBER_WORDS, QUESTIONS, SAMPLE_RATE, ask, say_digits, synthesise, voices
from motet.demo.tasks import (
    TASKS,
    Sources,
    answer_question,
    draw_example,
    draw_spoken_digits,
    read_sheets,
)

SPLITS = ("train", "heldout")
NUM_TRAIN, NUM_HELDOUT = 160, 80


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    write_demo_data(out, num_train=NUM_TRAIN, num_heldout=NUM_HELDOUT, seed=3, num_workers=0)
    return out


@pytest.fixture(scope="module")
def contents(dataset: Path) -> dict[str, dict]:
    """What each media file holds, by its path."""
    return {record["path"]: record for record in _read(dataset / "media.jsonl")}


def test_same_seed_writes_same_bytes_whatever_the_workers(tmp_path: Path) -> None:
    digests = []
    for name, seed, num_workers in (("one", 5, 0), ("two", 5, 2), ("other", 6, 0)):
        write_demo_data(tmp_path / name, num_train=24, num_heldout=8, seed=seed, num_workers=num_workers)
        digests.append(_digests(tmp_path / name))
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_manifests_have_the_sizes_and_tasks_asked_for(dataset: Path) -> None:
    for split, count in zip(SPLITS, (NUM_TRAIN, NUM_HELDOUT), strict=True):
        records = _read(dataset / f"{split}.jsonl")
        assert len(records) == count
        assert len({record["id"] for record in records}) == count
        assert {record["task"] for record in records} == set(TASKS)


@pytest.mark.parametrize("split", SPLITS)
def test_placeholders_match_media_and_files_decode(dataset: Path, split: str) -> None:
    used = set()
    for record in _read(dataset / f"{split}.jsonl"):
        assert [turn["from"] for turn in record["conversations"]] == ["human", "gpt"]
        question = record["conversations"][0]["value"]
        for modality in ("image", "audio"):
            paths = _media(record, modality)
            assert question.count(f"<{modality}>") == len(paths)
            used.update(paths)
    for path in used:
        if path.endswith(".png"):
            with Image.open(dataset / path) as image:
                image.load()
                assert image.mode == "L" and not image.width % CELL_PIXELS and not image.height % CELL_PIXELS
        else:
            with wave.open(str(dataset / path)) as clip:
                assert (clip.getnchannels(), clip.getsampwidth(), clip.getframerate()) == (1, 2, SAMPLE_RATE)
                assert clip.getnframes() == len(clip.readframes(clip.getnframes())) // 2 > SAMPLE_RATE // 10


def test_every_media_file_is_listed_and_present(dataset: Path, contents: dict[str, dict]) -> None:
    on_disk = {
        str(path.relative_to(dataset)) for folder in ("images", "audio") for path in (dataset / folder).iterdir()
    }
    assert on_disk == set(contents)


def test_splits_share_no_handwriting_no_voice_and_no_file(dataset: Path, contents: dict[str, dict]) -> None:
    seen = {split: {"instances": set(), "rates": set(), "pitches": set(), "paths": set()} for split in SPLITS}
    for record in contents.values():
        of_split = seen[record["split"]]
        of_split["instances"].update(record.get("instances", ()))
        if "rate" in record:
            of_split["rates"].add(record["rate"])
            of_split["pitches"].add(record["pitch"])
    for split in SPLITS:
        for record in _read(dataset / f"{split}.jsonl"):
            paths = _media(record, "image") + _media(record, "audio")
            assert all(contents[path]["split"] == split for path in paths)
    for kind in ("instances", "rates", "pitches"):
        assert seen["train"][kind] and seen["heldout"][kind]
        assert not seen["train"][kind] & seen["heldout"][kind], kind
    handwriting = load_handwriting()
    used = [{index for of_digit in handwriting[split].instances for index in of_digit} for split in SPLITS]
    assert not used[0] & used[1] and len(used[0] | used[1]) == len(handwriting["train"].pixels)


def test_every_answer_follows_from_the_media(dataset: Path, contents: dict[str, dict]) -> None:
    for split in SPLITS:
        for record in _read(dataset / f"{split}.jsonl"):
            sheets = tuple(tuple(contents[path]["rows"]) for path in _media(record, "image"))
            said = [contents[path]["meaning"] for path in _media(record, "audio")]
            answer = record["conversations"][1]["value"]
            if record["task"] == "image":
                asked = set(record["conversations"][0]["value"].split()) & set(QUESTIONS)
                expected = answer_question("".join(sheets[0]), asked.pop()) if asked else read_sheets(sheets)
                assert answer == expected
            elif record["task"] == "speech":
                assert answer == "".join(said)
            elif record["task"] == "spoken_question":
                assert answer == answer_question("".join(sheets[0]), said[0])
            else:
                assert answer == _answer_text(record["conversations"][0]["value"])


def test_spoken_questions_cannot_be_guessed_from_one_modality() -> None:
    """The best guess that knows only the clip's meaning, or only the sheet, is right far less often than one in two."""
    handwriting, rng = load_handwriting()["train"], random.Random(0)
    sources = Sources(handwriting, voices("train"), ())
    examples = [draw_example("spoken_question", sources, rng) for _ in range(3000)]
    by_clip: dict[str, Counter[str]] = {}
    right_from_sheet = 0.0
    for example in examples:
        by_clip.setdefault(example.utterances[0].meaning, Counter())[example.answer] += 1
        digits = "".join(example.sheets[0].rows)
        # All that a reader of the sheet alone can do: the answer to most of the questions.
        answers = Counter(answer_question(digits, question) for question in QUESTIONS)
        right_from_sheet += max(answers.values()) / len(QUESTIONS)
    from_clip = sum(max(counts.values()) for counts in by_clip.values()) / len(examples)
    assert from_clip < 0.4
    assert right_from_sheet / len(examples) < 0.5


def test_lengths_have_long_tails() -> None:
    rng = random.Random(1)
    sources = Sources(load_handwriting()["train"], voices("train"), draw_spoken_digits(voices("train"), 300, rng))
    examples = [draw_example(task, sources, rng) for task in TASKS for _ in range(400)]
    sizes = {
        "image": sorted(sum(len("".join(s.rows)) for s in e.sheets) for e in examples if e.task == "image"),
        "speech": sorted(sum(len(u.meaning) for u in e.utterances) for e in examples if e.task == "speech"),
        "text": sorted(len(e.question) for e in examples if e.task == "text"),
    }
    for task, of_task in sizes.items():
        assert of_task[-1] >= 3 * of_task[len(of_task) // 2], task


def test_tokenizer_opens_in_transformers_and_marks_the_answer(dataset: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(dataset / "tokenizer")
    special = ["<pad>", "<bos>", "<eos>", "<image>", "<audio>"]
    assert [tokenizer.convert_ids_to_tokens(tokenizer.convert_tokens_to_ids(token)) for token in special] == special
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == tuple(special[:3])
    turns = [{"role": "user", "content": "<image> antes de <audio>: 42?"}, {"role": "assistant", "content": "37 | 1"}]
    encoded = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    answer = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(answer) == "37 | 1<eos>"
    assert tokenizer.decode(encoded["input_ids"]) == "<bos><user><image> antes de <audio>: 42?<assistant>37 | 1<eos>"
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded["input_ids"][: len(prompt)] == prompt


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        write_demo_data(tmp_path, num_train=0, num_heldout=1)
    handwriting = load_handwriting()["train"]
    with pytest.raises(ValueError, match="one length"):
        draw_sheet(("12", "3"), handwriting, random.Random(0))


def test_synthesis_does_not_depend_on_what_was_said_before() -> None:
    voice = voices("heldout")[0]
    first = synthesise(say_digits("37", voice))
    synthesise(ask("last", voice))
    assert synthesise(say_digits("37", voice)) == first


def _answer_text(question: str) -> str:
    """Solve a text example from its words alone."""
    digit_of = {word: str(digit) for words in NUMBER_WORDS.values() for digit, word in enumerate(words)}
    words = [word.removesuffix(":") for word in question.split()]
    given = "".join(digit_of.get(word, word) for word in words if word in digit_of or word.isdecimal())
    asked = set(words) & set(QUESTIONS)
    return answer_question(given, asked.pop()) if asked else given


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _media(record: dict, modality: str) -> list[str]:
    return record.get(f"{modality}s", [record[modality]] if modality in record else [])


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
