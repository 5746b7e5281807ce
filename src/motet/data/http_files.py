"""Files of web servers as a file system of `fsspec`, read by Python's own client: it needs no package beside."""

from __future__ import annotations

import http.client
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from fsspec.spec import AbstractFileSystem

_TIMEOUT_S = 60.0
"""How long a server may say nothing."""
_SAFE = "%/:=&?~#+!$,;'@()*[]"
"""What a URL may hold as it is; spaces and letters of other scripts are escaped."""
_PARTIAL = 206
_NO_HEAD = (403, 405, 501)
"""What servers answer that know no HEAD, or signed the URL for GET alone."""


class HTTPFiles(AbstractFileSystem):  # type: ignore[misc]
    """`http://` and `https://` for reading. A server lists no folder, so there are neither folders nor patterns."""

    protocol = ("http", "https")
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size, type, and the headers `ETag` and `LastModified` where the server sends them. Raises OSError."""
        try:
            answer = _answer(path, method="HEAD")
        except OSError as error:
            if getattr(error, "code", 0) not in _NO_HEAD:
                raise
            answer = _answer(path)
        with answer:
            headers = answer.headers
        length = headers.get("Content-Length")
        about = {"ETag": headers.get("ETag"), "LastModified": headers.get("Last-Modified")}
        return {"name": path, "type": "file", "size": int(length) if length else None} | about

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes [start, end) of a file. Raises OSError, NotImplementedError if the server sends no parts."""
        if start is None and end is None:
            with _answer(path) as answer:
                return _all(answer)
        with _answer(path, {"Range": f"bytes={start or 0}-{'' if end is None else end - 1}"}) as answer:
            if answer.status != _PARTIAL:
                raise NotImplementedError("its server sends whole files only, so no shard is read in place there")
            return _all(answer)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> IO[bytes]:
        """A file to be read once, from its beginning."""
        return _answer(path)

    def open(self, path: str, mode: str = "rb", **_: Any) -> IO[bytes]:
        """As `_open`. Raises OSError."""
        return self._open(path, mode)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Raises NotImplementedError."""
        raise NotImplementedError("a web server lists no folder; name its files, with braces if there are many")

    def glob(self, path: str, **_: Any) -> list[str]:
        """Raises NotImplementedError."""
        return self.ls(path)


class _Refused(OSError):
    """An answer that is no file. code: HTTP's."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _Forbidden(_Refused, PermissionError):
    pass


def _answer(url: str, headers: dict[str, str] | None = None, method: str = "GET") -> Any:
    """What a server answers with the file. Raises OSError."""
    # Compressed on the way, a file would have another length.
    request = Request(quote(url, safe=_SAFE), headers={"Accept-Encoding": "identity"} | (headers or {}), method=method)
    try:
        return urlopen(request, timeout=_TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code in (404, 410):
            raise FileNotFoundError(url) from None
        kind = _Forbidden if error.code in (401, 403) else _Refused
        raise kind(f"HTTP {error.code} {error.reason}", error.code) from None


def _all(answer: Any) -> bytes:
    """The whole body. Raises EOFError if it is cut off."""
    try:
        data: bytes = answer.read()
    except http.client.IncompleteRead as error:
        raise EOFError(f"{len(error.partial):,} bytes came, and then no more") from None
    return data
