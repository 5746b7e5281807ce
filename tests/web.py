"""A web server of a folder, on loopback, that can fail for a while: what tests of remote files read from."""

import hashlib
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Web:
    """url: of the folder. asked: requests by (method, path). failing: how often a path yet fails, by path.

    parts: whether it sends parts of files. cut: so many bytes of an answer are not sent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, ""
        self.asked, self.failing = Counter(), Counter()
        self.parts, self.cut = True, 0


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, web: Web, *args) -> None:
        self.web = web
        super().__init__(*args)

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        name, web = unquote(urlsplit(self.path).path).lstrip("/"), self.web
        web.asked[self.command, name] += 1
        if web.failing[name] > 0:
            web.failing[name] -= 1
            return self.send_error(503)
        path = web.folder / name
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        tag, status = hashlib.sha256(data).hexdigest()[:16], 200
        if (part := self.headers.get("Range")) and web.parts:
            first, last = part.removeprefix("bytes=").split("-")
            data, status = data[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) - web.cut])

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving(folder: Path):
    """The `Web` of a folder."""
    web = Web(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, web))
    web.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
