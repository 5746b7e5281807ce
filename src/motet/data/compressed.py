"""Files that are compressed as a whole, by their endings: gzip, bzip2, xz."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from motet.core.files import open_regular
from motet.data.remote_manifest import RemoteFile

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz")
"""What may stand behind the ending of a format."""
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises, or one that is cut off."""


def is_compressed(path: Path | RemoteFile) -> bool:
    """Whether a file is compressed, by its ending."""
    return path.suffix.lower() in _OPENERS


def open_file(path: Path | RemoteFile) -> IO[bytes]:
    """The bytes of a file; of a remote one those of its local copy. Raises OSError, and as `Copies.open`."""
    return path.open_copy() if isinstance(path, RemoteFile) else open_regular(path)


def open_decompressed(path: Path | RemoteFile) -> IO[bytes]:
    """The contents of a file, decompressed if its ending says so. Raises OSError. Reading backward starts anew."""
    file = open_file(path)
    opener = _OPENERS.get(path.suffix.lower())
    opened: IO[bytes] = file if opener is None else opener(file, "rb")
    return opened
