"""The `[data]` section of a recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from motet.core.limits import MAX_RANKS, MAX_SEED
from motet.core.words import counted_words
from motet.data.copies import Copies
from motet.data.order import whole_weights
from motet.data.selection import LengthRule

_SPLIT = re.compile(r"\{rank(?::0([1-9])d)?\}")
"""The number of a split in a manifest's name: {rank}, or {rank:05d} in five digits."""
_CACHE_BYTES = 64 << 30

Cap = Annotated[int, Field(ge=1, le=2**31 - 1)]


class LoadingConfig(BaseModel):
    """The examples of a job: which of them are taken, in which order, and how they are loaded.

    max_sequence_length: the longest example that is trained on, rows of its media included; longer ones are left out,
                         counted and reported, unless `too_long` says otherwise; None: no bound.
    shuffle, seed:       the order of examples; the same seed gives the same order on any number of ranks.
    group:               None: a microbatch is so many examples. Else the examples of an epoch are grouped, and a
                         microbatch of a rank is a group: caps on the summed length of a group's items by phase, as in
                         `{ image = 4096, backbone = 8192 }`, or "auto", which finds them from the lengths
                         (`motet.data.groups`). `run.batch_size` then counts groups, which ranks share evenly.
    num_workers:         processes of each rank that decode media and build indexes, at most 256. 0: the rank does it
                         itself, and a file that kills its decoder kills the rank. With service = "ray", actors of each
                         rank, with a CPU each, under a Plan of those that read media for all; processes build
                         indexes all the same.
    service:             what decodes media. "local": processes on the machine of the rank. "ray": actors of a Ray
                         cluster (`pip install "motet[ray]"`), with the same bytes.
    ray_address:         "host:port" of the cluster, or "auto" for the one whose node runs on this machine. None: that
                         of RAY_ADDRESS; without it, each machine's first rank starts Ray there, until the run ends.
    prefetch_steps:      steps that are decided and loaded ahead, at most 64, all in memory.
    prefetch_bytes:      media of the steps that are loaded ahead, on each rank, in bytes: a step more is loaded as soon
                         as it fits beside them, and one always. None: no bound but prefetch_steps.
    max_bad_fraction:    the job stops if a larger share of the examples so far has unusable files, if a larger share of
                         all has them, or needs more memory than a rank has, at the start, or if no example is left.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_sequence_length: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    shuffle: bool = True
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    group: Literal["auto"] | dict[str, Cap] | None = None
    num_workers: Annotated[int, Field(ge=0, le=256)] = 2
    service: Literal["local", "ray"] = "local"
    ray_address: Annotated[str | None, Field(pattern=r"^(auto|[^\s:]+:[0-9]{1,5})$")] = None
    prefetch_steps: Annotated[int, Field(ge=1, le=64)] = 2
    prefetch_bytes: Annotated[int | None, Field(ge=1, le=2**63 - 1)] = None
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01

    @model_validator(mode="after")
    def _service_has_actors(self) -> LoadingConfig:
        if self.service == "ray" and self.num_workers == 0:
            raise ValueError(
                'service = "ray" decodes in num_workers actors of each rank, and num_workers is 0; raise it'
            )
        if self.service != "ray" and self.ray_address is not None:
            raise ValueError('ray_address has no effect without service = "ray"; set that, or remove it')
        return self


class FilesConfig(LoadingConfig):
    """The files of a job, and how they are loaded.

    train, heldout: manifests (files, directories or patterns of tar shards), read one after the other. If names in
                    `train` contain {rank}, each rank has a split of its own, which no other rank reads.
    num_splits:     with {rank} in `train`: the number of splits, by default that of the ranks. Rank r reads the splits
                    r, r + number of ranks, ...
    mixture:        a weight for each manifest of `train`, in their order: its share of the examples of a run, in any
                    unit. A manifest then has epochs of its own: a small one with a large weight comes round more often.
                    Without it, every example of all manifests comes once in an epoch.
    too_long:       what becomes of examples longer than max_sequence_length. "drop": they are left out, counted and
                    named. "truncate": an example is cut behind the last learned token within the bound, and each item
                    is whole or gone; one of which nothing learned is left is left out, and so are longer ones of
                    `heldout`, as answers are compared whole. "error": the job stops before its first step, and names
                    the first.
    index_folder:   a folder for indexes, if the manifests' own folders cannot be written.
    cache_folder:   where local copies of remote files are kept: manifests, shards and media may then be URLs (s3://,
                    gs://, az://, hf://, https://). A folder of each machine itself, which all processes there share.
                    None: nothing is downloaded.
    cache_bytes:    the most bytes that these copies take; the least recently used make room. By default 64 GiB.
    """

    train: Annotated[tuple[str, ...], Field(min_length=1)]
    num_splits: Annotated[int | None, Field(ge=1, le=MAX_RANKS)] = None
    heldout: tuple[str, ...] = ()
    too_long: LengthRule = "drop"
    mixture: tuple[Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)], ...] = ()
    index_folder: Path | None = None
    cache_folder: Path | None = None
    cache_bytes: Annotated[int | None, Field(ge=1, le=2**63 - 1)] = None

    @property
    def copies(self) -> Copies | None:
        """Where remote files are copied to; None: there may be none."""
        if self.cache_folder is None:
            return None
        return Copies(str(self.cache_folder), self.cache_bytes or _CACHE_BYTES)

    @model_validator(mode="after")
    def _remote_files_have_a_folder(self) -> FilesConfig:
        if self.cache_bytes is not None and self.cache_folder is None:
            raise ValueError("cache_bytes has no effect without cache_folder; set that, or remove it")
        return self

    @model_validator(mode="after")
    def _a_weight_a_manifest(self) -> FilesConfig:
        if self.mixture and len(self.mixture) != len(self.train):
            raise ValueError(
                f"mixture has {counted_words(len(self.mixture), 'weight')} for "
                f"{counted_words(len(self.train), 'manifest')} of train; give each one, in their order"
            )
        if len(self.mixture) == 1:
            raise ValueError("mixture has no effect with one manifest; remove it")
        if self.mixture:
            whole_weights(self.mixture)
        return self

    @model_validator(mode="after")
    def _seed_shuffles(self) -> FilesConfig:
        if self.seed and not self.shuffle:
            raise ValueError(f"seed = {self.seed} has no effect with shuffle = false; remove one of them")
        return self

    @model_validator(mode="after")
    def _too_long_has_a_bound(self) -> FilesConfig:
        if self.too_long != "drop" and self.max_sequence_length is None:
            raise ValueError("too_long has no effect without max_sequence_length; set that, or remove too_long")
        return self

    @model_validator(mode="after")
    def _names_splits_alike(self) -> FilesConfig:
        named = [_SPLIT.search(manifest) is not None for manifest in self.train]
        for manifest in self.train + self.heldout:
            if "{rank" in _SPLIT.sub("", manifest):
                raise ValueError(f"{manifest}: a rank is written {{rank}}, or {{rank:05d}} for five digits")
        if any(named) and not all(named):
            raise ValueError(
                f"{self.train[named.index(False)]} in train is the same for all ranks, and "
                f"{self.train[named.index(True)]} is not; all of train must have {{rank}} in their names, or none"
            )
        for manifest in self.heldout:
            if _SPLIT.search(manifest):
                raise ValueError(f"{manifest} in heldout: all ranks must read the same held-out examples")
        if self.num_splits is not None and not any(named):
            raise ValueError("num_splits has no effect without {rank} in the names of train; remove it")
        if self.mixture and any(named):
            raise ValueError(
                "mixture gives manifests their shares, and with {rank} in the names of train each split has its share "
                "by its size; remove mixture, or name manifests that all ranks read"
            )
        return self

    @property
    def weights(self) -> tuple[int, ...]:
        """The mixture in whole numbers; () without one."""
        return whole_weights(self.mixture) if self.mixture else ()

    @property
    def is_split(self) -> bool:
        """Whether each rank has training examples of its own."""
        return _SPLIT.search(self.train[0]) is not None

    def split(self, number: int) -> tuple[str, ...]:
        """The training manifests of a split, counted from 0."""
        return tuple(
            _SPLIT.sub(lambda found: str(number).zfill(int(found[1] or 0)), manifest) for manifest in self.train
        )


class DataConfig(FilesConfig):
    """The data of a job, and how it is loaded.

    tokenizer: directory with tokenizer.json.
    """

    tokenizer: Path


class DrawnDataConfig(LoadingConfig):
    """Examples that are drawn from a workload: there are no files. `seed` draws them as well.

    num_workers: processes of each rank that make the contents of items; making them takes less than sending them.
    """

    train: ClassVar[tuple[str, ...]] = ()
    heldout: ClassVar[tuple[str, ...]] = ()
    is_split: ClassVar[bool] = False
    weights: ClassVar[tuple[int, ...]] = ()

    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
