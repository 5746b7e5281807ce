"""The examples of `make demo-generate`, and the judge of what is made of them."""

import json

import numpy as np
import pytest

pytest.importorskip("ttspico")
from PIL import Image

from motet.core.errors import UserError
from motet.demo import Judge, write_drawing_data
from motet.demo.images import load_handwriting
from motet.demo.speech import NUMBER_WORDS


def records(folder, split):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def words(record):
    return set(record["conversations"][0]["value"].split()) - {"<audio>"}


NAMES = {*"0123456789", *(word for of_language in NUMBER_WORDS.values() for word in of_language)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("drawing")
    write_drawing_data(out, num_train=120, num_heldout=40, num_workers=0)
    return out


def test_held_out_prompts_have_words_and_voices_of_their_own(folder):
    train, heldout = records(folder, "train"), records(folder, "heldout")
    seen, unseen = (set().union(*map(words, split)) - NAMES for split in (train, heldout))
    assert len(seen) > 20
    assert len(unseen) > 10
    assert not seen & unseen
    spoken = [{record["audio"] for record in split if "audio" in record} for split in (train, heldout)]
    assert all(spoken)
    assert not spoken[0] & spoken[1]
    assert sorted((r["digit"], r["task"]) for r in heldout) == sorted(
        (digit, kind) for digit in range(10) for kind in ("text", "speech") for _ in range(2)
    )


def test_a_prompt_names_its_digit_once_and_the_answer_holds_it(folder):
    handwriting = load_handwriting()
    for split in ("train", "heldout"):
        for record in records(folder, split):
            human, gpt = (turn["value"] for turn in record["conversations"])
            assert gpt == f"<image>{record['digit']}"  # Behind the picture: what makes it must not read the name.
            named = [word for word in human.split() if word in NAMES or word == "<audio>"]
            assert len(named) == 1
            if record["task"] == "text":
                digit = record["digit"]
                assert named[0] in {str(digit), *(of_language[digit] for of_language in NUMBER_WORDS.values())}
            assert (folder / record.get("audio", record["image"])).stat().st_size > 60
            instance = int(record["image"][len("digits/") : -len(".png")])
            assert instance in handwriting[split].instances[record["digit"]]
            with Image.open(folder / record["image"]) as image:
                ink = 1 - np.asarray(image) / 255
            assert ink == pytest.approx(handwriting[split].pixels[instance], abs=1 / 255)


def test_the_same_call_writes_the_same(folder, tmp_path):
    write_drawing_data(tmp_path, num_train=120, num_heldout=40, num_workers=0)
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*.*")) if path.parent.name != "digits"]
    assert len(files) > 50
    assert [(folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in files] == [True] * len(files)


def test_numbers_below_one_are_refused(tmp_path):
    with pytest.raises(UserError, match="must be at least 1, got 0 and 3"):
        write_drawing_data(tmp_path, num_train=0, num_heldout=3)


def test_each_figure_of_the_judge_catches_what_it_is_for():
    judge, rng = Judge(), np.random.default_rng(0)
    real, digits = judge.real["heldout"]
    good = judge.verdict(real, digits)
    assert good.misses == []
    assert good.read == good.real_read > 0.95
    assert (good.spread, good.distance) == (1, good.real_distance)
    wrong = judge.verdict(real, (digits + 1) % 10)
    assert wrong.read < 0.05
    assert len(wrong.misses) == 1
    train, of_train = judge.real["train"]
    copied = judge.verdict(train[:100] + 0.01 * rng.standard_normal((100, 64)), of_train[:100])
    assert copied.near == 1
    assert "nearly training digits" in copied.misses[-1]
    means = np.stack([train[of_train == digit].mean(axis=0) for digit in range(10)])
    alike = judge.verdict(np.repeat(means, 10, axis=0), np.repeat(np.arange(10), 10))
    assert alike.read > 0.95
    assert alike.spread == pytest.approx(0, abs=1e-9)
    assert alike.misses == ["two of a digit differ less than 50% as much as real ones"]
    assert judge.verdict(rng.random((50, 64)), np.arange(50) % 10).read < 0.4
