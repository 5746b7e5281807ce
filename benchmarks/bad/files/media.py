"""One item among good ones in a small training job, be it bad, odd or good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bad.files.base import as_lines, record, records, train
from bad.files.damage import PLACES, Change, cut, flip, nothing_left, text, zeros
from bad.run import Case

LEFT_OUT = r"Left out[^\n]*bad\.{ending}: \S"
"""What is said of an item that is left out: its file, and a reason."""
_ANY = "data.max_bad_fraction=1"


def _with_item(modality: str, ending: str, place: bytes | Change) -> Change:
    def change(folder: Path) -> None:
        path = folder / f"media/bad.{ending}"
        if isinstance(place, bytes):
            path.write_bytes(place)
        else:
            path.write_bytes(b"")
            place(path)
        item = record(6, **{modality: f"media/bad.{ending}"})
        # Five of seven, so that the bad one is met in the first epoch wherever it comes.
        (folder / "train.jsonl").write_text(as_lines([*records(), item]))

    return change


def bad_item(modality: str, name: str, ending: str, place: bytes | Change, *, allowed: bool = True) -> Case:
    """One that cannot be used: left out and named, or, where none is allowed, named in the sentence that ends the run.

    Whoever has ten million files wants to train on the others; whoever allows no bad one wants to hear of the first.
    """
    change = _with_item(modality, ending, place)
    if allowed:
        return train(f"{modality}/{name}", "accept", change, _ANY, says=LEFT_OUT.format(ending=ending))
    return train(f"{modality}/{name}", "refuse", change, says=rf"bad\.{ending}")


def good_item(modality: str, name: str, ending: str, data: bytes) -> Case:
    """One that can be used, though no bad one is allowed."""
    return train(f"{modality}/{name}", "accept", _with_item(modality, ending, data))


def odd_item(modality: str, name: str, ending: str, data: bytes) -> Case:
    """One that may be used or left out: the run goes on, and its losses are finite."""
    return train(f"{modality}/{name}", "accept", _with_item(modality, ending, data), _ANY)


def damaged_items(
    modality: str, ending: str, whole: bytes, seed: int, *, cuts: Mapping[str, float], num_flips: int, header_bytes: int
) -> Iterator[Case]:
    """A whole file of a format, and the same under each damage that every format is tried with.

    cuts: what is left of it, in words and as a share, too little to be taken for whole. num_flips: how often bits are
    flipped, anywhere and within the first header_bytes.
    """
    yield good_item(modality, f"whole {ending}", ending, whole)
    damages = {"empty": nothing_left, "zeros": zeros, "a web page": text}
    damages |= {f"cut to {words}": cut(share) for words, share in cuts.items()}
    for name, damage in damages.items():
        yield bad_item(modality, f"{ending} {name}", ending, damage(whole))
    # Where the flipped bits lie decides whether anything can notice them: neither may end the run.
    for number in range(num_flips):
        yield odd_item(modality, f"{ending} flipped {number}", ending, flip(seed + number)(whole))
        header = flip(seed + number, 3, end=header_bytes)(whole)
        yield odd_item(modality, f"{ending} flipped in its header {number}", ending, header)


def place_cases() -> Iterator[Case]:
    """What stands in the place of a media file, and names that are none."""
    for modality, ending in (("image", "png"), ("audio", "wav")):
        for name, place in PLACES.items():
            yield bad_item(modality, f"{name} in the place of a file", ending, place)
            yield bad_item(modality, f"{name} in the place of a file, none allowed", ending, place, allowed=False)
        yield _all_bad(modality, ending)
    names = {
        "a name of 10,000 characters": "x" * 10_000,
        "an absolute name": "/proc/self/mem",
        "a folder": "media",
        "a null character": "a\0",
    }
    for name, given in names.items():
        change = _named(given)
        yield train(f"image/{name}", "accept", change, _ANY, says=r"Left out[^\n]*: \S")
        yield train(f"image/{name}, none allowed", "refuse", change)
    yield train("image/an empty name", "refuse", _named(""), _ANY, says="train.jsonl, line 7")


def _named(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "train.jsonl").write_text(as_lines([*records(), record(6, image=name)]))

    return change


def _all_bad(modality: str, ending: str) -> Case:
    """Nothing can be learned of nothing, whatever is allowed."""

    def change(folder: Path) -> None:
        for number in range(3):
            (folder / f"media/bad{number}.{ending}").write_bytes(b"nothing that anyone knows")
        items = [record(number, **{modality: f"media/bad{number}.{ending}"}) for number in range(3)]
        (folder / "train.jsonl").write_text(as_lines(items))

    return train(f"{modality}/all are bad", "refuse", change, _ANY, says=rf"bad0\.{ending}")
