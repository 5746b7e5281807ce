"""Reads the lengths of an analysis from a manifest or from a table, and states the assumptions.

A manifest has pixels, samples and text. A table (CSV, also gzipped) has some of the columns image_width, image_height,
num_images, image_tokens, audio_seconds and text_tokens. The lengths that a model makes of these are assumptions, which
every report states.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import math
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.data.audio import AudioTransform
from motet.data.clip_bounds import MAX_SECONDS
from motet.data.conversation import Conversation
from motet.data.copies import Copies
from motet.data.dataset import Dataset
from motet.data.images import ImageTransform
from motet.data.index_lock import IndexProgress
from motet.data.left_out import describe_left_out
from motet.data.media import AUDIO, IMAGE
from motet.data.modality import Modality
from motet.data.remote import check_protocol, copy_to, find, is_url, path_of
from motet.data.text import ChatTokenizer

LENGTH_UNITS = {IMAGE: "patches", AUDIO: "frames"}
_BYTES_A_TOKEN = 4
_COPIES_BYTES = 64 << 30
"""The most that local copies of remote files take."""
_FRAMES_A_TOKEN = 4
_FRAMES_PER_S = 100
_TILE_PATCHES, _TILE_TOKENS = 1025, 256
_IMAGES = ImageTransform(patch_size=14, merge_size=2, max_pixels_side=1344)
# Clips are not cut, so that an analysis shows the long ones too.
_CLIPS = AudioTransform(sampling_rate=16_000, hop_length=16_000 // _FRAMES_PER_S, max_seconds=MAX_SECONDS)
_MAX_VALUE, _MAX_IMAGES = 1 << 32, 100_000
"""The largest value in a table, and the most images of a row. More is a mistake, and would fill the memory."""
_MIN_SIMILARITY = 0.85
"""A column whose name is at least this similar to a known one is taken for a misspelling."""
_MAX_SHOWN = 40
_LENGTH_NAME = re.compile(r"num_\w+|\w+_(?:width|height|pixels|patches|seconds|samples|frames|tokens)")
_COLUMNS = ("image_width", "image_height", "num_images", "image_tokens", "audio_seconds", "text_tokens")


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of all examples of a source.

    assumptions: sentences that say what was assumed about the lengths.
    left_out:    a sentence on examples that cannot be used; empty if there are none.
    weight:      float64 [num_examples], how often each is drawn, in any unit; None is all equal.
    units:       what the lengths of a phase count.
    added:       the phases whose rows take no tokens of their own: they are added to those of another phase, or are
                 those of a turn.
    """

    source: str
    batch: BatchLengths
    assumptions: tuple[str, ...]
    left_out: str = ""
    weight: Float64Array | None = None
    units: Mapping[str, str] = field(default_factory=lambda: LENGTH_UNITS)
    added: frozenset[str] = frozenset()

    @property
    def phases(self) -> tuple[str, ...]:
        """The modalities that occur, without text."""
        return tuple(name for name, items in self.batch.items.items() if items.num_items)

    def tokens_of(self, phase: str) -> Int64Array:
        """Tokens that a modality takes in each example's sequence, int64 [num_examples]."""
        items = self.batch.items[phase]
        num_tokens = items.num_tokens * (phase not in self.added)
        return np.bincount(items.example, num_tokens, self.batch.num_examples).astype(np.int64)

    def kinds(self) -> Int64Array:
        """The combination of modalities of each example, int64 [num_examples]: bit i is set if it has `phases[i]`."""
        kinds = np.zeros(self.batch.num_examples, dtype=np.int64)
        for bit, phase in enumerate(self.phases):
            kinds[self.batch.items[phase].example] |= 1 << bit
        return kinds

    def workload(self, *, even: bool = False) -> Workload:
        """The workload of these examples. even: each combination of modalities is drawn equally often.

        Loss is taken on all text of a table.
        """
        kinds = self.kinds()
        weight = 1.0 / np.bincount(kinds)[kinds] if even else self.weight
        batch = self.batch if self.batch.num_targets.any() else replace(self.batch, num_targets=self.text_tokens())
        return Workload(self.source, batch, weight, self.assumptions)

    def text_tokens(self) -> Int64Array:
        """Text tokens of each example's sequence, int64 [num_examples]."""
        return self.batch.sequence - sum((self.tokens_of(phase) for phase in self.phases), np.int64(0))


def read_lengths(
    source: str | Path,
    *,
    tokenizer: str | Path | None = None,
    index_folder: str | Path | None = None,
    num_workers: int = 0,
    progress: IndexProgress | None = None,
) -> Lengths:
    """Read a manifest, or a table if `source` ends in .csv or .csv.gz. Raises UserError for a missing or wrong file.

    source: a path or a URL, of which copies are kept in a temporary folder.
    """
    if is_url(source):
        with tempfile.TemporaryDirectory(prefix="motet-") as folder:
            check_protocol(str(source), "motet analyze")
            copies = Copies(folder, _COPIES_BYTES)
            return _read(str(source), copies, tokenizer, folder, num_workers, progress)
    return _read(source, None, tokenizer, index_folder, num_workers, progress)


def _read(
    source: str | Path,
    copies: Copies | None,
    tokenizer: str | Path | None,
    index_folder: str | Path | None,
    num_workers: int,
    progress: IndexProgress | None,
) -> Lengths:
    """As `read_lengths`. copies: of what is at URLs."""
    path = Path(source) if copies is None else path_of(str(source))
    if path.name.endswith((".csv", ".csv.gz")):
        if tokenizer is not None:
            raise UserError(
                f"{source}: a table of lengths holds no text, so a tokenizer is of no use with it; leave it out"
            )
        return _read_table(Path(source) if copies is None else _copied(str(source), Path(copies.folder)))
    text = _EstimatedText() if tokenizer is None else ChatTokenizer.from_directory(tokenizer)
    modalities = {
        IMAGE: Modality(
            _IMAGES, lambda sizes: sizes.prod(axis=1) // _IMAGES.merge_size**2, lambda sizes: sizes.prod(axis=1)
        ),
        AUDIO: Modality(_CLIPS, lambda sizes: _tokens_of_frames(sizes[:, 0]), lambda sizes: sizes[:, 0]),
    }
    dataset = Dataset.open(
        [source],
        text,
        modalities,
        index_folder=index_folder,
        copies=copies,
        num_workers=num_workers,
        progress=progress,
    )
    left_out = dataset.left_out
    assumptions = [_IMAGE_ASSUMPTION, _AUDIO_ASSUMPTION]
    if tokenizer is None:
        assumptions.append(f"Text: {_BYTES_A_TOKEN} bytes a token, as no tokenizer was given.")
    return Lengths(
        str(source),
        dataset.batch_lengths(np.arange(dataset.num_examples), 1),
        tuple(assumptions),
        f"{describe_left_out(left_out, dataset.num_in_manifests)}; the first: {left_out.first()}"
        if len(left_out)
        else "",
    )


def _copied(url: str, folder: Path) -> Path:
    """A table by its URL, as a file of its name. Raises UserError."""
    found = find(url)
    if found is None:
        raise UserError(f"{url}: there is no such file; it must be a manifest, or a table of lengths (.csv, .csv.gz)")
    path = folder / path_of(url).name
    with path.open("wb") as file:
        copy_to(found, file)
    return path


_IMAGE_ASSUMPTION = (
    f"Images: native size up to {_IMAGES.max_pixels_side} pixels a side, patches of {_IMAGES.patch_size} pixels, "
    f"{_IMAGES.merge_size} x {_IMAGES.merge_size} patches a token."
)
_AUDIO_ASSUMPTION = (
    f"Audio: {_FRAMES_PER_S} frames a second, {_FRAMES_A_TOKEN} frames a token, no padding to 30 seconds."
)
_TILE_ASSUMPTION = (
    f"Images without a size: {_TILE_PATCHES:,} patches where they take {_TILE_TOKENS} tokens each (InternVL's tiles), "
    f"else {_IMAGES.merge_size**2} patches a token."
)


class _EstimatedText:
    """Replaces a tokenizer: the number of tokens is the number of bytes / _BYTES_A_TOKEN, rounded up."""

    fingerprint = f"estimated-{_BYTES_A_TOKEN}-bytes-a-token"

    def encode(self, conversation: Conversation, raws: Sequence[tuple[int, int]] = ()) -> TokenSequence:
        said = [turn.text + (json.dumps(turn.calls) if turn.calls else "") for turn in conversation.turns]
        lengths = [math.ceil(len(text.encode()) / _BYTES_A_TOKEN) for text in said]
        is_target = [turn.has_loss for turn in conversation.turns]
        num_items = len(conversation.placeholders)
        targets = np.concatenate([np.zeros(num_items, dtype=bool), np.repeat(is_target, lengths)])
        return TokenSequence(
            np.zeros(len(targets), dtype=np.int64), targets, conversation.placeholders, np.arange(num_items)
        )

    def encode_prompt(
        self, conversation: Conversation, raws: Sequence[tuple[int, int]] = ()
    ) -> tuple[TokenSequence, str]:
        before, answer = conversation.without_last_answer()
        return self.encode(before), answer

    def items_of(self, modality: str) -> tuple[str, ...]:
        """Its own alone: without a model, the sound of videos is not read."""
        return (modality,)

    def item_tokens(self, modality: str) -> frozenset[int]:
        """None: an item has no marks around it."""
        return frozenset()


def _tokens_of_frames(frames: Int64Array) -> Int64Array:
    return -(-frames // _FRAMES_A_TOKEN)


@dataclass
class _Column:
    """The items of one modality while a table is read."""

    example: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def add(self, example: int, length: int, num_tokens: int) -> None:
        self.example.append(example)
        self.length.append(length)
        self.num_tokens.append(num_tokens)

    def items(self) -> ItemLengths:
        columns = (np.array(column, dtype=np.int64) for column in (self.example, self.length, self.num_tokens))
        return ItemLengths(*columns)


def _read_table(path: Path) -> Lengths:
    columns = {IMAGE: _Column(), AUDIO: _Column()}
    text: list[int] = []
    for number, row in enumerate(_rows(path)):
        text.append(round(row["text_tokens"]))
        for length, num_tokens in _images_of(row):
            columns[IMAGE].add(number, length, num_tokens)
        if row["audio_seconds"]:
            frames = max(math.ceil(row["audio_seconds"] * _FRAMES_PER_S), 1)
            columns[AUDIO].add(number, frames, math.ceil(frames / _FRAMES_A_TOKEN))
    if not text:
        raise UserError(f"{path}: holds no row; it must hold one an example")
    items = {name: column.items() for name, column in columns.items()}
    sequence = np.array(text, dtype=np.int64)
    for column in items.values():
        np.add.at(sequence, column.example, column.num_tokens)
    no_targets, home = np.zeros(len(text), dtype=np.int64), np.zeros(len(text), dtype=np.int32)
    batch = BatchLengths(sequence, no_targets, home, items)
    return Lengths(str(path), batch, (_IMAGE_ASSUMPTION, _TILE_ASSUMPTION, _AUDIO_ASSUMPTION))


def _rows(path: Path) -> Iterator[dict[str, float]]:
    """The numbers of each row by column; an empty field is 0. Raises UserError with the line."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; it must be a manifest, or a table of lengths (.csv, .csv.gz)")
    reader = None
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as data:
            reader = csv.DictReader(io.TextIOWrapper(data, encoding="utf-8-sig", newline=""), strict=True)
            known = _known_columns(path, reader.fieldnames or ())
            for row in reader:
                if None in row or None in row.values():
                    more = "more" if None in row else "fewer"
                    raise UserError(f"{path}, line {reader.line_num}: has {more} fields than line 1 has names")
                numbers = dict.fromkeys(_COLUMNS, 0.0) | {
                    name: _number(row[name], f"{path}, line {reader.line_num}: '{name}'", _max_of(name))
                    for name in known
                }
                _check_images(numbers, bool(row.get("num_images")), f"{path}, line {reader.line_num}")
                yield numbers
    except csv.Error as error:
        line = reader.reader.line_num if reader else 1
        raise UserError(f"{path}, line {line}: is no CSV ({error})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: is no whole gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _known_columns(path: Path, names: Sequence[str]) -> list[str]:
    """The known columns. Others are metadata (`task`, ...). Raises UserError if another is named like a length."""
    for name in names:
        close = difflib.get_close_matches(name.strip().lower(), _COLUMNS, n=1, cutoff=_MIN_SIMILARITY)
        if name in _COLUMNS and names.count(name) > 1:
            raise UserError(f"{path}, line 1: names '{name}' twice; each column must have a name of its own")
        if name not in _COLUMNS and (close or _LENGTH_NAME.fullmatch(name)):
            hint = f"; is it meant to be '{close[0]}'? Rename" if close else ", which is no length that is read; rename"
            raise UserError(f"{path}, line 1: has a column '{name[:40]}'{hint} or remove it")
    known = [name for name in _COLUMNS if name in names]
    if not known:
        raise UserError(f"{path}, line 1: names no known column; it must name some of {', '.join(_COLUMNS)}")
    return known


def _max_of(name: str) -> int:
    return _MAX_IMAGES if name == "num_images" else _MAX_VALUE


def _number(text: str | None, where: str, most: int) -> float:
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        shown = repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
        raise UserError(f"{where} is {shown}, but must be empty or a number from 0 to {most:,}")
    return value


def _check_images(row: Mapping[str, float], is_counted: bool, where: str) -> None:
    """Raise UserError for images without a length, and for lengths of no image. is_counted: num_images is not empty."""
    width, height, count = row["image_width"], row["image_height"], round(row["num_images"])
    if bool(width) != bool(height):
        raise UserError(f"{where}: has one of image_width and image_height; it must have both, or none")
    if count and not (width or row["image_tokens"]):
        raise UserError(
            f"{where}: 'num_images' is {count}, and nothing says how large they are; it must have image_width and "
            "image_height, or image_tokens"
        )
    if is_counted and not count and (width or row["image_tokens"]):
        raise UserError(f"{where}: 'num_images' is 0, and it has lengths of images; one of them must be left out")


@lru_cache(maxsize=1 << 16)
def _patches(width: int, height: int) -> int:
    return int(_IMAGES.sizes(np.array([[width, height]])).prod())


def _images_of(row: dict[str, float]) -> list[tuple[int, int]]:
    """(patches, tokens) of each image of a row."""
    count, tokens = round(row["num_images"]), round(row["image_tokens"])
    if row["image_width"] and row["image_height"]:
        patches = _patches(round(row["image_width"]), round(row["image_height"]))
        return [(patches, patches // _IMAGES.merge_size**2)] * max(count, 1)
    if not tokens:
        return []
    count = max(count, 1)
    shares = [tokens // count + (number < tokens % count) for number in range(count)]
    tiled = tokens == count * _TILE_TOKENS
    return [(_TILE_PATCHES if tiled else share * _IMAGES.merge_size**2, share) for share in shares]
