"""Media loaded in worker processes, in order; a file that cannot be used comes back as BadMedia in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from motet.core.example import Media
from motet.data.media import BadMedia, MediaRef
from motet.data.transforms import Transform, load_media
from motet.data.workers import WorkerPool


class Decoder:
    """Loads items with the transform of their modality ("image", "audio"), in `num_workers` processes; 0: in this one.

    Close it, or use it in a `with` block. A worker that is killed raises WorkerDied, naming the file it was at.
    """

    def __init__(self, transforms: Mapping[str, Transform], num_workers: int = 0) -> None:
        self._pool = WorkerPool(num_workers, _Loader, dict(transforms))

    def submit(self, refs: Sequence[MediaRef]) -> list[Future[Media | BadMedia]]:
        """Start loading; one future an item."""
        return [self._pool.submit(ref) for ref in refs]

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
