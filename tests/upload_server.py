"""A local server that speaks the part of the hub's API with which repositories are made and filled."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any


class Hub:
    """Repositories by name, each a mapping of file names to contents; and what is to go wrong."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.refuse: dict[str, int] = {}
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON for a request."""
        for part, status in self.refuse.items():
            if part in path:
                return status, {"error": "refused on purpose"}
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
            self.repos.setdefault(name, {".gitattributes": b""})
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"/([\w-]+/[\w-]+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._object(each) for each in json.loads(body)["objects"]]}
        if match := re.fullmatch(r"/objects/(\w+)", path):
            self.objects[match[1]] = body
            return 200, {}
        if match := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(?:/(\w+).*)?", path):
            if match[1] not in self.repos:
                return 404, {"error": "no such repository"}
            return self._repository(self.repos[match[1]], match[1], match[2], body)
        return 404, {"error": f"{method} {path}"}

    def _object(self, entry: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.url}/objects/{entry['oid']}"}
        return {"oid": entry["oid"], "size": entry["size"], "actions": {"upload": upload}}

    def _repository(self, files: dict[str, bytes], name: str, what: str | None, body: bytes) -> tuple[int, Any]:
        if what == "tree":
            return 200, [{"type": "file", "path": path, "size": len(d), "oid": "0" * 40} for path, d in files.items()]
        if what == "preupload":
            listed = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                    for f in listed
                ]
            }
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
        return 200, {"id": name, "sha": "0" * 40, "siblings": [{"rfilename": path} for path in files]}


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _reply(self) -> None:
            status, content = hub.answer(self.command, self.path.split("?")[0], self._body())
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _reply

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
