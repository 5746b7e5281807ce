"""Sampled workloads: distributions of the examples of each task, for jobs without data to measure yet.

A sampler's file is TOML:

    [[task]]
    name = "image chat"
    share = 2.0                                                    # relative number of examples
    text = { median = 70, spread = 0.8, min = 8, max = 5000 }      # tokens, log-normal
    answer = 0.5                                                   # share of the text on which loss is taken
    [task.items.image]                                             # the items of a module
    count = { choices = [1, 3, 5], weights = [1, 5, 4] }           # items in an example
    length = { value = 1025 }                                      # patches, audio frames, ... of an item
    length_per_token = 4                                           # length that makes a row of the backbone's sequence
                                                                   # (or num_tokens, for rows that hang on no length,
                                                                   # or turn = true, for none: a generator reads text)
    segment = 205                                                  # items are computed in segments of this length
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.text_files import parse_toml, read_text
from motet.core.workload import BatchLengths, ItemLengths, Workload

_POPULATION = 1 << 16
_MAX_AMOUNT = 1 << 32
"""The largest length or count."""
_MAX_ITEMS = 1 << 27
"""The most items of one module in all sampled examples of a task."""


Amount = Annotated[int, Field(ge=0, le=_MAX_AMOUNT)]
Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Distribution(BaseModel):
    """A distribution of lengths or counts.

    One of three kinds: a value; choices; or log-normal, exp(normal(log median, spread)), clipped to min ... max.

    value:    always this one.
    choices:  one of these.
    weights:  how often each choice comes, in any unit; () is equally often.
    median:   of a log-normal distribution.
    spread:   the standard deviation of the logarithm.
    min, max: what samples of a log-normal distribution are clipped to.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    value: Amount | None = None
    choices: tuple[Amount, ...] = ()
    weights: tuple[Weight, ...] = ()
    median: float | None = Field(default=None, ge=1e-6, le=_MAX_AMOUNT)
    spread: float = Field(default=0.0, ge=0, le=10)
    min: Amount = 1
    max: Amount = _MAX_AMOUNT

    @model_validator(mode="after")
    def _one_kind(self) -> Distribution:
        if (self.value is not None) + bool(self.choices) + (self.median is not None) != 1:
            raise ValueError("must have one of value, choices, median")
        if self.weights and len(self.weights) != len(self.choices):
            raise ValueError("must have as many weights as choices")
        if self.weights and not sum(self.weights) > 0:
            raise ValueError("must have a weight above 0")
        stray = sorted({"spread", "min", "max"} & self.model_fields_set)
        if stray and self.median is None:
            raise ValueError(f"has {stray[0]}, which has no effect without median")
        if self.min > self.max:
            raise ValueError("has min above max")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest that there may be."""
        if self.value is not None:
            return self.value, self.value
        if self.choices:
            weights = self.weights or [1.0] * len(self.choices)
            there = [choice for choice, weight in zip(self.choices, weights) if weight]
            return min(there), max(there)
        return (self.min, self.max) if self.spread else (self._median, self._median)

    @property
    def _median(self) -> int:
        """What is drawn without a spread."""
        return int(self.sample(1, np.random.default_rng(0))[0])

    def sample(self, count: int, rng: np.random.Generator) -> Int64Array:
        """`count` samples, int64 [count]."""
        if self.value is not None:
            return np.full(count, self.value, dtype=np.int64)
        if self.choices:
            share = np.array(self.weights or [1.0] * len(self.choices))
            return rng.choice(np.array(self.choices, dtype=np.int64), count, p=share / share.sum())
        drawn = rng.lognormal(np.log(self.median or 1.0), self.spread, count)
        return np.clip(drawn, self.min, self.max).astype(np.int64)


class Items(BaseModel):
    """The items of one module in an example of a task.

    length_per_token: the length that makes a row of the backbone's sequence.
    num_tokens:       in its place: the rows of each item there, whatever its length, as of queries of a generator.
    turn:             in its place: items have no row there, and a generator is given those of the text before the
                      answer, which is the turn before.
    segment:          items are computed in segments of this length, beyond which no row attends; None: as a whole.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    length: Distribution
    count: Distribution = Distribution(value=1)
    length_per_token: float = Field(default=1.0, ge=1e-3, le=_MAX_AMOUNT)
    num_tokens: int | None = Field(default=None, ge=1, le=_MAX_AMOUNT)
    turn: bool = False
    segment: int | None = Field(default=None, ge=1, le=_MAX_AMOUNT)

    @model_validator(mode="after")
    def _tokens_said_once(self) -> Items:
        if self.turn and (said := {"num_tokens", "length_per_token"} & self.model_fields_set):
            raise ValueError(f"has turn and {min(said)}, which both say what stands in the sequence of an item")
        if self.num_tokens is not None and "length_per_token" in self.model_fields_set:
            raise ValueError("has num_tokens and length_per_token, which both say how many rows an item takes")
        return self

    def tokens_of(self, length: ArrayLike) -> Int64Array:
        """The rows of the backbone's sequence that items of these lengths take, int64 of their shape."""
        if self.num_tokens is not None:
            return np.full(np.shape(length), self.num_tokens, dtype=np.int64)
        return np.ceil(np.asarray(length) / self.length_per_token).astype(np.int64)


class Task(BaseModel):
    """A kind of examples.

    name:   in tables and messages.
    share:  of the examples, in any unit.
    answer: the share of the text on which loss is taken.
    items:  by module, the items that an example has.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    name: str = Field(min_length=1)
    text: Distribution
    share: float = Field(default=1.0, gt=0, le=1e9)
    answer: float = Field(default=1.0, ge=0, le=1)
    items: dict[str, Items] = Field(default_factory=dict)

    def num_targets(self, text: ArrayLike) -> Int64Array:
        """The tokens of the answer in texts of these lengths, int64 of their shape."""
        return np.rint(np.asarray(text) * self.answer).astype(np.int64)


class Sampler(BaseModel):
    """A mixture of tasks.

    task: the tasks, at least one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    task: tuple[Task, ...] = Field(min_length=1)

    def workload(self, seed: int = 0, num_examples: int = _POPULATION) -> Workload:
        """A workload of `num_examples` examples; each task has its share of them, to within one example.

        Equal seeds give equal workloads. Raises UserError for a task with more than 2^27 items of a module.
        """
        rng = np.random.default_rng(seed)
        share = np.array([task.share for task in self.task])
        ends = np.rint(np.cumsum(share) / share.sum() * num_examples).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        names = dict.fromkeys(name for task in self.task for name in task.items)
        columns: dict[str, list[ItemLengths]] = {name: [] for name in names}
        sequence, num_targets = np.zeros(num_examples, np.int64), np.zeros(num_examples, np.int64)
        for task, start, count in zip(self.task, ends - counts, counts):
            text = task.text.sample(int(count), rng)
            sequence[start : start + count] = text
            answer = task.num_targets(text)
            num_targets[start : start + count] = answer
            for name, items in task.items.items():
                num_items = items.count.sample(int(count), rng)
                _check_count(task.name, name, int(num_items.sum()), int(count), "items")
                owner = np.repeat(np.arange(count), num_items)
                length = items.length.sample(len(owner), rng)
                num_tokens = (text - answer)[owner] if items.turn else items.tokens_of(length)
                if not items.turn:
                    sequence[start : start + count] += np.bincount(owner, num_tokens, count).astype(np.int64)
                cut = None
                if items.segment is not None:
                    _check_count(task.name, name, int((-(-length // items.segment)).sum()), int(count), "segments")
                    cut = ItemSegments.cut(length, items.segment)
                columns[name].append(ItemLengths(start + owner, length, num_tokens, cut))
        items_of = {name: ItemLengths.joined(parts) for name, parts in columns.items()}
        batch = BatchLengths(sequence, num_targets, np.zeros(num_examples, np.int32), items_of)
        return Workload("sampled: " + ", ".join(task.name for task in self.task), batch)


def _check_count(task: str, module: str, count: int, num_examples: int, what: str) -> None:
    """Raise UserError for more items or segments than memory is to hold."""
    if count > _MAX_ITEMS:
        raise UserError(
            f"Task {task!r} has {count:,} {what} of {module!r} in {num_examples:,} examples; there may be "
            f"{_MAX_ITEMS:,}."
        )


def read_sampler(path: Path) -> Sampler:
    """Read a sampler. Raises UserError for a file that is missing, is no TOML, or describes no mixture of tasks."""
    tables = parse_toml(read_text(path, "the sampler"), str(path))
    try:
        return Sampler.model_validate(tables)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {where}: {message[0].lower()}{message[1:]}.") from error
