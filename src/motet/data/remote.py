"""Files by URL, through `fsspec`: which URLs there are, what stands at one, and what is tried again when it fails.

A store that answers nothing, or an error of its own, is asked again with growing waits, five times in about eight
seconds. Then one sentence names the file and the last error, and the run ends on all ranks: a file that cannot be
reached for now is not a bad one, and leaving its example out would make training depend on the network. A file that
is not there, or may not be read, is not asked for again.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from motet.core.errors import UserError

PROTOCOLS = ("s3", "gs", "az", "abfs", "hf", "https", "http", "memory")
"""The protocols of URLs. Others of fsspec's reach into programs and files of this machine."""
LOCAL_URL = "file://"
"""How the URL of a path of this machine begins."""
ATTEMPTS = 5
"""How often a store is asked before it counts as out of reach."""
FIRST_WAIT_S = 0.5
"""Between the first two attempts; each later wait is twice as long."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_CHUNK_BYTES = 4 << 20
_AT_ONCE = 16
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
"""What asking again does not change."""
_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "generation",
    "blob_id",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
"""Where file systems say which version of a file stands at its URL; the first that one has."""
_T = TypeVar("_T")


class Unreachable(UserError):
    """A store that did not answer, however often it was asked."""


@dataclass(frozen=True)
class Found:
    """A file at a URL. version: differs if its content does; "" if nobody says."""

    url: str
    size_bytes: int
    version: str


def is_url(name: object) -> bool:
    """Whether a name is a URL, of whatever protocol; `file://` and `data:` are none."""
    match = _URL.match(str(name))
    return match is not None and match.group(1).lower() != "file"


def is_web(name: str) -> bool:
    """Whether a name is the URL of a web server, whose query and fragment are no part of a path."""
    return name.lower().startswith(("http://", "https://"))


def check_protocol(url: str, where: str) -> None:
    """Raise UserError, beginning with `where`, unless Motet reads URLs of this protocol."""
    if (protocol := url.partition("://")[0].lower()) not in PROTOCOLS:
        raise UserError(f"{where}: URLs of '{protocol}://' are not read; those are of {', '.join(PROTOCOLS)}")


def below(folder: str, name: str) -> str:
    """The URL of a file that is named relative to the URL of a folder.

    Raises UserError for a path of this machine, and for one that leaves the store.
    """
    protocol, _, path = folder.partition("://")
    inside = posixpath.normpath(posixpath.join(path, name))
    if name.startswith("/") or inside.partition("/")[0] != path.partition("/")[0]:
        raise UserError(
            f"'{name}' is not in the store of its manifest, {folder}; name it relative to that, or by a URL"
        )
    return f"{protocol}://{inside}"


def located(folder: str | Path, name: str) -> str:
    """The path or URL of a file that is named relative to a folder, or by its own URL. Raises as `below`."""
    if is_url(name):
        return name
    if isinstance(folder, Path):
        return os.path.join(folder, name)
    # On the web, a name's own signs could be taken for those of the URL.
    return below(folder, quote(name) if is_web(folder) else name)


def relative(url: str, folder: str | Path) -> str:
    """The name by which `located` finds a URL: relative to a folder, if it is below it."""
    inside = url.removeprefix(f"{folder}/")
    return unquote(inside) if inside != url and is_web(url) else inside


def path_of(url: str) -> PurePosixPath:
    """The path in a URL, for its name and its ending; without the query of a web address."""
    return PurePosixPath(urlsplit(url).path if is_web(url) else url.partition("://")[2])


def folder_of(url: str) -> str:
    """The URL of the folder of a file; a query is not part of it."""
    protocol, _, path = url.partition("://")
    return f"{protocol}://{posixpath.dirname(path.partition('?')[0] if is_web(url) else path)}"


def file_system(url: str) -> Any:
    """fsspec's file system for a URL. Raises UserError if its package is not installed."""
    import fsspec

    protocol = url.partition("://")[0].lower()
    if is_web(url):
        from motet.data.http_files import HTTPFiles

        return HTTPFiles()
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError as error:
        raise UserError(f'{url}: a package is missing ({error}); run pip install "motet[remote]"') from None


def tried(url: str, action: Callable[[Any], _T]) -> _T:
    """What `action` returns for the file system of a URL; tried again as the module says.

    Raises OSError for what lasts (FileNotFoundError, PermissionError, ...), and Unreachable.
    """
    files, last = file_system(url), ""
    for attempt in range(ATTEMPTS):
        try:
            return action(files)
        except (UserError, *_LASTING):
            raise
        except Exception as error:  # Each file system has kinds of its own.
            last = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if attempt + 1 < ATTEMPTS:
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise Unreachable(f"{url} cannot be reached, in {ATTEMPTS} attempts ({last}); start again when it can")


def find(url: str) -> Found | None:
    """The file at a URL; None if there is no file. Raises PermissionError, and as `tried`."""
    try:
        said = tried(url, lambda files: files.info(_inside(url)))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return _found(url, said) if said.get("type", "file") == "file" else None


def find_all(urls: Sequence[str]) -> list[Found | None]:
    """As `find`, of many at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(find, urls))


def names_in(folder: str) -> list[str]:
    """The URLs of the files of a folder, and of the folders in it, in order of name; [] if there is none."""
    try:
        said = tried(folder, lambda files: files.ls(_inside(folder.rstrip("/")), detail=True))
    except (FileNotFoundError, NotADirectoryError):
        return []
    protocol = folder.partition("://")[0]
    listed = (str(each["name"]) for each in said)
    names = sorted(name if is_url(name) else f"{protocol}://{name.lstrip('/')}" for name in listed)
    # A store names a file by itself, as the folder that it is not.
    return [name.rstrip("/") for name in names if name.rstrip("/") != folder.rstrip("/")]


def matches(pattern: str) -> list[str]:
    """The URLs of the files that a pattern with `*` or `?` names, in order of name."""
    protocol = pattern.partition("://")[0]
    paths = tried(pattern, lambda files: files.glob(_inside(pattern)))
    return sorted(path if is_url(path) else f"{protocol}://{path.lstrip('/')}" for path in map(str, paths))


def read_bytes(url: str, start: int = 0, num_bytes: int = -1) -> bytes:
    """The bytes of a file, or a part of them. Raises as `tried`."""
    end = None if num_bytes < 0 else start + num_bytes

    def read(files: Any) -> bytes:
        data: bytes = files.cat_file(_inside(url), start=start or None, end=end)
        if end is not None and len(data) != num_bytes:
            raise EOFError(f"{len(data):,} of {num_bytes:,} bytes came")
        return data

    return tried(url, read)


def copy_to(found: Found, file: IO[bytes]) -> None:
    """Write a file of any size into an open one, from its beginning. Raises as `tried`."""

    def copy(files: Any) -> None:
        file.seek(0)
        with files.open(_inside(found.url), "rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                with writing_locally():
                    file.write(chunk)
        if file.tell() != found.size_bytes:
            raise EOFError(f"{file.tell():,} of {found.size_bytes:,} bytes came")

    tried(found.url, copy)


def put_file(path: Path, url: str) -> None:
    """Copy a file of this machine to a URL, as a whole. Raises as `tried`."""
    size_bytes = path.stat().st_size

    def put(files: Any) -> None:
        _make_folder(files, url)
        files.put_file(str(path), _inside(url))
        if (there := int(files.info(_inside(url))["size"])) != size_bytes:
            raise EOFError(f"{there:,} of {size_bytes:,} bytes came")

    _written(url, put)


def write_bytes(url: str, data: bytes) -> None:
    """Put bytes in the place of a file. Raises as `tried`."""

    def write(files: Any) -> None:
        _make_folder(files, url)
        files.pipe_file(_inside(url), data)

    _written(url, write)


def remove_files(urls: Sequence[str]) -> None:
    """Remove files, as far as they are there. Raises as `tried`."""
    for url in urls:
        with suppress(FileNotFoundError):
            _written(url, lambda files, url=url: files.rm_file(_inside(url)))


def remove_folder(url: str) -> None:
    """Remove an empty folder of a disk; stores have none. One that is not empty stays."""
    if url.startswith(LOCAL_URL):
        with suppress(OSError):
            file_system(url).rmdir(_inside(url))


def _written(url: str, action: Callable[[Any], None]) -> None:
    try:
        tried(url, action)
    except (PermissionError, NotImplementedError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(f"{url} cannot be written ({error or type(error).__name__})") from error


def _make_folder(files: Any, url: str) -> None:
    # Stores have no folders; disks do.
    if url.startswith(LOCAL_URL):
        files.makedirs(posixpath.dirname(_inside(url)), exist_ok=True)


@contextmanager
def writing_locally() -> Iterator[None]:
    """Raise an OSError of this machine's disk as a UserError, so that it is not taken for one of the store."""
    try:
        yield
    except OSError as error:
        raise UserError(f"a local copy cannot be written ({error.strerror or error})") from error


def _found(url: str, said: dict[str, Any]) -> Found:
    size = said.get("size")
    if size is None:
        raise UserError(f"{url}: its server does not say how long it is; name a file of a server that does")
    return Found(url, int(size), next((f"{said[key]}" for key in _VERSIONS if said.get(key)), ""))


def _inside(url: str) -> str:
    """What a file system calls a file: its URL on the web, else its path."""
    path = url.partition("://")[2]
    return url if is_web(url) else path
