"""Media loaded in worker processes, in order; a file that cannot be used comes back as BadMedia in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from motet.core.example import Media
from motet.data.media import BadMedia, MediaRef
from motet.data.transforms import Transform, load_media
from motet.data.workers import WorkerDied, WorkerPool


class Decoder:
    """Loads items with the transform of their modality ("image", "audio"), in `num_workers` processes; 0: in this one.

    Close it, or use it in a `with` block. In worker processes, a file that kills its decoder is bad like any other; in
    this one it ends the program. WorkerDied is raised where workers go on dying, whatever they read.
    """

    def __init__(self, transforms: Mapping[str, Transform], num_workers: int = 0) -> None:
        self._pool = WorkerPool(num_workers, _Loader, dict(transforms))

    def submit(self, refs: Sequence[MediaRef]) -> list[Future[Media | BadMedia]]:
        """Start loading; one future an item."""
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
        """Load and wait: what became of each item, in order."""
        return [future.result() for future in self.submit(refs)]

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Loader:
    """Lives in a worker process."""

    def __init__(self, transforms: dict[str, Transform]) -> None:
        self._transforms = transforms

    def __call__(self, ref: MediaRef) -> Media | BadMedia:
        try:
            return load_media(ref, self._transforms[ref.modality])
        except BadMedia as bad:
            # Without the traceback's frames, which would hold the whole image.
            return BadMedia(bad.path, bad.reason)
