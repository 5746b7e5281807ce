"""Loads media in worker processes, in order; the result for an unusable file is a BadMedia."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from motet.core.example import Media
from motet.data.media import BadMedia, MediaRef
from motet.data.transforms import Transform, load_media
from motet.data.workers import WorkerDied, WorkerPool


class Decoder:
    """Loads items with the transforms of the encoders that read them, in `num_workers` processes; 0: in this one.

    transforms: by the name of an encoder. An item that several read is decoded once.

    Close it, or use it in a `with` block. A file that kills its decoder is a BadMedia in a worker process; in this
    process it ends the program. Raises WorkerDied if workers die again and again.
    """

    def __init__(self, transforms: Mapping[str, Transform], num_workers: int = 0) -> None:
        self._pool = WorkerPool(num_workers, _Loader, dict(transforms))

    def submit(
        self, refs: Sequence[MediaRef], readers: Sequence[Sequence[str]] | None = None
    ) -> list[Future[Media | BadMedia]]:
        """Start loading; a future for each item and each of its readers, in order.

        readers: of each item, the names of the encoders that read it; by default one, named after the item's modality.
        """
        if readers is None:
            readers = [(ref.modality,) for ref in refs]
        return [future for ref, names in zip(refs, readers, strict=True) for future in self._submit(ref, names)]

    def _submit(self, ref: MediaRef, readers: Sequence[str]) -> list[Future[Media | BadMedia]]:
        loaded: list[Future[Media | BadMedia]] = [Future() for _ in readers]

        def settle(done: Future[list[Media] | BadMedia]) -> None:
            error = done.exception()
            bad: Media | BadMedia | None = None
            if isinstance(error, WorkerDied) and not error.is_final:
                bad = BadMedia(ref.name, f"its decoder {error.how}")
            elif error is None and isinstance(result := done.result(), BadMedia):
                bad = result
            for number, future in enumerate(loaded):
                if bad is None and error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(bad or done.result()[number])

        self._pool.submit((ref, tuple(readers))).add_done_callback(settle)
        return loaded

    def load(self, refs: Sequence[MediaRef], readers: Sequence[Sequence[str]] | None = None) -> list[Media | BadMedia]:
        """Load the items and wait for them; results are in the order of `submit`."""
        return [future.result() for future in self.submit(refs, readers)]

    def close(self) -> None:
        """Finish the submitted items, and end the workers."""
        self._pool.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Loader:
    """The handler of the workers: one item, for all encoders that read it."""

    def __init__(self, transforms: dict[str, Transform]) -> None:
        self._transforms = transforms

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
