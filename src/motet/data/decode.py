"""Loads media in worker processes or actors, in order; the result for an unusable file is a BadMedia."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from motet.core.errors import UserError
from motet.core.example import Media
from motet.core.modalities import AUDIO, IMAGE, VIDEO
from motet.data.listed_frames import frames_in
from motet.data.media import BadMedia, MediaRef, failure_reason
from motet.data.ray_actors import RayCluster
from motet.data.transforms import Transform, load_media
from motet.data.videos import amount_of
from motet.data.workers import TASK_LIMIT_S, WorkerDied, WorkerPool

LIMIT, LIMIT_IN_WORDS = 0.75, "three quarters"
"""The part of the time that ranks wait for each other in which an item must be decoded, so that its rank says which
is not before others say that they have waited for the rank.
"""


class Decoder:
    """Loads items with the transforms of the encoders that read them, in `num_workers` processes; 0: in this one.

    transforms: by the name of an encoder. An item that several read is decoded once.

    cluster: loads in as many actors of a Ray cluster instead. Closing the decoder does not close it.

    limit_s: an item that takes longer hangs.

    Close it, or use it in a `with` block. A file that kills its decoder is a BadMedia in a worker; in this process it
    ends the program. Raises WorkerDied if workers die again and again, UserError for a file that actors cannot open and
    this process can, and TimeoutError for an item that hangs, with the file's name.
    """

    def __init__(
        self,
        transforms: Mapping[str, Transform],
        num_workers: int = 0,
        cluster: RayCluster | None = None,
        *,
        limit_s: float = TASK_LIMIT_S,
    ) -> None:
        self._cluster, self._limit_s = cluster, limit_s
        self._is_here, self._hangs = num_workers == 0, False
        given = dict(transforms), num_workers > 0
        if cluster is None:
            self._pool = WorkerPool(num_workers, _Loader, *given, limit_s=limit_s)
        else:
            start = cluster.start_actor
            self._pool = WorkerPool(num_workers, _ElsewhereLoader, *given, limit_s=limit_s, start=start)

    @property
    def num_deaths(self) -> int:
        """Workers that have died so far."""
        return self._pool.num_deaths

    @property
    def num_workers(self) -> int:
        """Workers that take items; of others, dead ones wait for room on another machine."""
        return self._pool.num_workers

    @property
    def store_bytes(self) -> int:
        """The most that results of this rank's actors have taken in Ray's object store at once; 0 without Ray."""
        return 0 if self._cluster is None else self._cluster.store_bytes

    def submit(
        self, refs: Sequence[MediaRef], readers: Sequence[Sequence[str]] | None = None
    ) -> list[Future[Media | BadMedia]]:
        """Start loading; a future for each item and each of its readers, in order.

        Workers get the items that take longest first, by pixels (of all frames) or samples, so that they end together.
        readers: of each item, the names of the encoders that read it; by default one, named after the item's modality.
        """
        if readers is None:
            readers = [(ref.modality,) for ref in refs]
        given = list(zip(refs, readers, strict=True))
        # A worker that is free takes the next item: list scheduling, longest first (Graham 1969).
        order = sorted(range(len(given)), key=lambda place: -_seconds(given[place][0]) * len(given[place][1]))
        loading = {place: self._submit(*given[place]) for place in order}
        return [future for place in range(len(given)) for future in loading[place]]

    def _submit(self, ref: MediaRef, readers: Sequence[str]) -> list[Future[Media | BadMedia]]:
        loaded: list[Future[Media | BadMedia]] = [Future() for _ in readers]
        if self._is_here and self._hangs:
            return loaded  # Nobody waits for it but behind the item that hangs; it would take as long.

        def settle(done: Future[list[Media] | BadMedia | _NotOpened]) -> None:
            error: BaseException | None = done.exception()
            bad: BadMedia | None = None
            if isinstance(error, WorkerDied) and error.hangs:
                error, self._hangs = self._hanging(ref), True
            elif isinstance(error, WorkerDied) and not error.is_final:
                error, bad = None, BadMedia(ref.name, f"its decoder {error.how}")
            elif error is None and isinstance(result := done.result(), BadMedia):
                bad = BadMedia(ref.name, result.reason)
            elif error is None and isinstance(result, _NotOpened):
                error, bad = result.error(ref), BadMedia(ref.name, result.reason)
            for number, future in enumerate(loaded):
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(bad or done.result()[number])

        # An actor has another working directory.
        is_here = self._cluster is None or ref.copies is not None
        folder = os.path.abspath(ref.folder) if ref.folder else ""
        task = ref if is_here else replace(ref, path=os.path.abspath(ref.path), folder=folder)
        self._pool.submit((task, tuple(readers))).add_done_callback(settle)
        return loaded

    def _hanging(self, ref: MediaRef) -> TimeoutError:
        why = (
            f"decoding it has not ended in {self._limit_s:g} s, {LIMIT_IN_WORDS} of run.wait_limit_s; mend or remove "
            "it, or raise that"
        )
        return TimeoutError(errno.ETIMEDOUT, why, ref.name)

    def load(self, refs: Sequence[MediaRef], readers: Sequence[Sequence[str]] | None = None) -> list[Media | BadMedia]:
        """Load the items and wait for them; results are in the order of `submit`."""
        return loaded_items((future, lambda: "") for future in self.submit(refs, readers))

    def close(self) -> None:
        """Finish the submitted items, and end the workers."""
        self._pool.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._pool.__exit__(kind, *rest)


def loaded_items(items: Iterable[tuple[Future[Media | BadMedia], Callable[[], str]]]) -> list[Media | BadMedia]:
    """Submitted items, once all of them are loaded. Raises as `Decoder` says, as soon as one of them fails.

    items: each with what says the manifest and the line of its example; "" if it is of none.
    """
    submitted = list(items)
    wait([future for future, _ in submitted], return_when=FIRST_EXCEPTION)
    for future, where in submitted:
        error = future.exception() if future.done() else None
        if isinstance(error, TimeoutError):
            name = ": ".join(filter(None, (where(), error.filename)))
            raise TimeoutError(error.errno, error.strerror, name) from error
        if error is not None:
            raise error
    return [future.result() for future, _ in submitted]


_S_PER_UNIT = {IMAGE: 3e-8, AUDIO: 1e-8, VIDEO: 5e-9}
"""About what a pixel or a sample takes; only which item takes longer counts."""


def _seconds(ref: MediaRef) -> float:
    return amount_of(ref) * _S_PER_UNIT.get(ref.modality, _S_PER_UNIT[AUDIO])


class _Loader:
    """The handler of the workers: one item, for all encoders that read it.

    opens: whether this is a worker, in which transforms are opened. Raises UserError for one that cannot be.
    """

    def __init__(self, transforms: dict[str, Transform], opens: bool) -> None:
        self._transforms = transforms
        for transform in transforms.values():
            if opens and hasattr(transform, "open"):
                transform.open()

    def __call__(self, task: tuple[MediaRef, tuple[str, ...]]) -> list[Media] | BadMedia:
        ref, readers = task
        try:
            if len(readers) == 1:
                return [load_media(ref, self._transforms[readers[0]])]
            decoded: dict[Hashable, Any] = {}
            return [load_media(ref, self._transforms[name], decoded) for name in readers]
        except BadMedia as bad:
            # A new exception, because the traceback's frames hold the whole image.
            return BadMedia(bad.path, bad.reason)


class _ElsewhereLoader(_Loader):
    """The handler of actors. It tells a file that is not there from one that is of no use."""

    def __call__(self, task: tuple[MediaRef, tuple[str, ...]]) -> Any:
        loaded = super().__call__(task)
        if isinstance(loaded, BadMedia) and _why_not_opened(task[0]):
            return _NotOpened(loaded.reason, socket.gethostname())
        return loaded


@dataclass(frozen=True)
class _NotOpened:
    """A file that an actor cannot open, and where the actor runs. reason: a clause."""

    reason: str
    node: str

    def error(self, ref: MediaRef) -> UserError | None:
        """The error if this process can open the file; None: it is as bad here."""
        if _why_not_opened(ref):
            return None
        what = f"{ref.name} (frames in {ref.folder})" if ref.is_held_list else ref.path
        return UserError(
            f"{what} can be opened here and not on Ray's node {self.node} ({self.reason}): give all nodes of Ray "
            "the files of the job, under the same paths"
        )


def _why_not_opened(ref: MediaRef) -> str:
    """Why a file cannot be opened here, as a clause; "" if it can."""
    try:
        ref.open().close()
        for frame in frames_in(ref) if ref.is_held_list else ():
            frame.open().close()
    except OSError as error:
        return failure_reason(error)
    return ""
