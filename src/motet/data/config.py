"""The `[data]` section of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from motet.core.limits import MAX_SEED


class LoadingConfig(BaseModel):
    """The examples of a job: which of them are taken, in which order, and how they are loaded.

    max_sequence_length: longer examples (media included) are left out, counted and reported; None: no bound.
    shuffle, seed:       the order of examples; the same seed gives the same order on any number of ranks.
    num_workers:         processes of each rank that decode media and build indexes, at most 256. 0: the rank does it
                         itself, and a file that kills its decoder kills the rank.
    prefetch_steps:      steps that are decided and loaded ahead, at most 64, all in memory.
    max_bad_fraction:    the job stops if a larger share of the examples so far has unusable files, or if no example is
                         left.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_sequence_length: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    shuffle: bool = True
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    num_workers: Annotated[int, Field(ge=0, le=256)] = 2
    prefetch_steps: Annotated[int, Field(ge=1, le=64)] = 2
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01


class DataConfig(LoadingConfig):
    """The data of a job, and how it is loaded.

    train, heldout: manifests (files, directories or patterns of tar shards), read one after the other.
    tokenizer:      directory with tokenizer.json.
    index_folder:   a folder for indexes, if the manifests' own folders cannot be written.
    """

    train: Annotated[tuple[str, ...], Field(min_length=1)]
    heldout: tuple[str, ...] = ()
    tokenizer: Path
    index_folder: Path | None = None


class DrawnDataConfig(LoadingConfig):
    """Examples that are drawn from a workload: there are no files. `seed` draws them as well.

    num_workers: processes of each rank that make the contents of items; making them takes less than sending them.
    """

    train: ClassVar[tuple[str, ...]] = ()
    heldout: ClassVar[tuple[str, ...]] = ()

    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
