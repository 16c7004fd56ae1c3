"""A hub on this machine: the parts of its API that reading needs, with faults on demand, counting what it sends."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/([^?]+))?(?:\?.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


@dataclasses.dataclass
class Hub:
    """What the server holds and what it was asked.

    ``repositories`` gives the folder of each. ``faults`` are taken one for each request of a range: ``drop`` closes the
    connection without an answer, ``truncate`` after half of it, ``whole`` sends the file without minding the range, and
    a number is a status, 401 as the hub answers tokens that it doesn't know; ``api_faults`` and ``file_faults`` are the
    same for the API and for whole files. ``busy`` gives headers for statuses. With ``elsewhere``, weights are on a
    second host, which the answer points to. ``sent`` counts bytes of answers by file, ``ranges`` has the ranges asked
    for, ``tokens`` what hosts were told to prove who asks.
    """

    repositories: dict[str, pathlib.Path]
    url: str = ""
    token: str | None = None
    commit: str = COMMIT
    faults: list[str | int] = dataclasses.field(default_factory=list)
    api_faults: list[str | int] = dataclasses.field(default_factory=list)
    file_faults: list[str | int] = dataclasses.field(default_factory=list)
    busy: dict[str, str] = dataclasses.field(default_factory=dict)
    elsewhere: bool = False
    tokens: set[tuple[str, str | None]] = dataclasses.field(default_factory=set)
    sent: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ranges: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    requests: int = 0

    def sent_weights(self) -> int:
        """Bytes sent of safetensors files."""
        return sum(count for name, count in self.sent.items() if name.endswith(".safetensors"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.hub.requests += 1
        host = self.headers["Host"].partition(":")[0]
        self.hub.tokens.add((host, self.headers.get("Authorization")))
        away = host == "localhost"  # the other host, which is never told a token
        if self.hub.elsewhere and not away and "/resolve/" in self.path and self.path.endswith(".safetensors"):
            self.send_response(302)
            self.send_header("Location", self.hub.url.replace("127.0.0.1", "localhost") + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        api, file = _API.fullmatch(self.path), _FILE.fullmatch(self.path)
        match = api or file
        if match is None or match[1] not in self.hub.repositories:
            self._refuse(404, "RepoNotFound")
        elif self.hub.token and not away and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(403, "GatedRepo")
        elif (match[2] or "main") not in ("main", self.hub.commit):
            self._refuse(404, "RevisionNotFound")
        elif api:
            self._list(match[1])
        else:
            assert file is not None
            self._file(self.hub.repositories[file[1]] / file[3], body)

    def _refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 401:
            self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
        for name, value in self.hub.busy.items() if status in (429, 503) else ():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, repository: str) -> None:
        fault = self.hub.api_faults.pop(0) if self.hub.api_faults else None
        if fault == "drop":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._refuse(fault)
            return
        folder = self.hub.repositories[repository]
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        if "/tree/" in self.path:
            answer: Any = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
        else:
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            answer = {"id": repository, "sha": self.hub.commit, "siblings": files}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _file(self, path: pathlib.Path, body: bool) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data, given = path.read_bytes(), self.headers.get("Range")
        first, last = 0, len(data) - 1
        fault = None
        if given:
            first, last = (int(number) for number in given.removeprefix("bytes=").split("-"))
            self.hub.ranges.append((path.name, first, last + 1 - first))
            fault = self.hub.faults.pop(0) if self.hub.faults else None
        elif self.hub.file_faults:
            fault = self.hub.file_faults.pop(0)
        if fault == "drop":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._refuse(fault)
            return
        part = data if fault == "whole" or not given else data[first : last + 1]
        self.send_response(206 if given and fault != "whole" else 200)
        if given and fault != "whole":
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not body:
            return
        if fault == "truncate":
            part, self.close_connection = part[: len(part) // 2], True
        with contextlib.suppress(ConnectionError):
            self.hub.sent[path.name] += len(part)
            self.wfile.write(part)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no matter."""


@contextlib.contextmanager
def serve(**repositories: pathlib.Path) -> Iterator[Hub]:
    """A hub on a free port with the repositories ``org/NAME``."""
    hub = Hub({f"org/{name.replace('_', '-')}": folder for name, folder in repositories.items()})
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
