"""Loads media in worker processes, in order; the result for an unusable file is a BadMedia."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from motet.core.example import Media
from motet.data.media import BadMedia, MediaRef
from motet.data.transforms import Transform, load_media
from motet.data.workers import WorkerDied, WorkerPool


class Decoder:
    """Loads items with the transform of their modality ("image", "audio"), in `num_workers` processes; 0: in this one.

    Close it, or use it in a `with` block. A file that kills its decoder is a BadMedia in a worker process; in this
    process it ends the program. Raises WorkerDied if workers die again and again.
    """

    def __init__(self, transforms: Mapping[str, Transform], num_workers: int = 0) -> None:
        self._pool = WorkerPool(num_workers, _Loader, dict(transforms))

    def submit(self, refs: Sequence[MediaRef]) -> list[Future[Media | BadMedia]]:
        """Start loading; one future for each item."""
        return [self._submit(ref) for ref in refs]

    def _submit(self, ref: MediaRef) -> Future[Media | BadMedia]:
        loaded: Future[Media | BadMedia] = Future()

        def settle(done: Future[Media | BadMedia]) -> None:
            error = done.exception()
            if isinstance(error, WorkerDied) and not error.is_final:
                loaded.set_result(BadMedia(ref.name, f"its decoder {error.how}"))
            elif error is not None:
                loaded.set_exception(error)
            else:
                loaded.set_result(done.result())

        self._pool.submit(ref).add_done_callback(settle)
        return loaded

    def load(self, refs: Sequence[MediaRef]) -> list[Media | BadMedia]:
        """Load the items and wait for them; results are in order."""
        return [future.result() for future in self.submit(refs)]

    def close(self) -> None:
        """Finish the submitted items, and end the workers."""
        self._pool.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Loader:
    """The handler of the workers: one item."""

    def __init__(self, transforms: dict[str, Transform]) -> None:
        self._transforms = transforms

    def __call__(self, ref: MediaRef) -> Media | BadMedia:
        try:
            return load_media(ref, self._transforms[ref.modality])
        except BadMedia as bad:
            # A new exception, because the traceback's frames hold the whole image.
            return BadMedia(bad.path, bad.reason)
