"""A web server that speaks as model hubs and web folders do, and misbehaves on request: for the tests of the model store."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
OTHER_COMMIT = "5cfe71fd56ed83d5ca27f04c1345cc7d862bbe4f"
REPO = "org/model"
LFS_FROM_BYTES = 1000
PAGE = 3


@dataclass
class Hub:
    """What the server has and how it fails. `files` by path; the other fields are by path too.

    `cut_at`: after so many bytes of the answer the connection is reset, a number a try; `statuses`: answers to give first, as
    (status, Retry-After); `wrong`: contents to serve instead, one a request; `short`: only so many bytes are there.
    """

    files: dict[str, bytes]
    cut_at: dict[str, list[int]] = field(default_factory=dict)
    statuses: dict[str, list[tuple[int, str | None]]] = field(default_factory=dict)
    wrong: dict[str, list[bytes]] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    no_range: bool = False
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def asked_for(self, path: str) -> list[str | None]:
        """The Range of each request for a file's content."""
        return [part for name, part in self.asked if name == path]


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def serve(hub: Hub, address: str = "127.0.0.1") -> Iterator[Hub]:
    """Serve it on a free port of the loopback, or of another address of this machine."""
    server = http.server.ThreadingHTTPServer((address, 0), _handler(hub))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://{address}:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            path, query = unquote(parts.path), parse_qs(parts.query)
            if found := re.fullmatch(rf"/api/models/{REPO}/revision/(.+)", path):
                known = {"main": COMMIT, COMMIT: COMMIT}.get(found[1])
                self._json({"sha": known}) if known else self._plain(404, b"")
            elif path == f"/api/models/{REPO}/commits/main":
                self._json([{"id": OTHER_COMMIT}, {"id": COMMIT}])
            elif path == f"/api/models/{REPO}/tree/{COMMIT}":
                self._tree(int(query.get("cursor", ["0"])[0]))
            elif path == f"/api/v1/models/{REPO}/repo/files":
                self._modelscope(query)
            elif path == f"/api/v1/models/{REPO}/repo":
                self._file(query["FilePath"][0])
            elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
                # As hubs do: the content lies elsewhere.
                self.send_response(302)
                self.send_header("Location", "/cdn/" + path.removeprefix(f"/{REPO}/resolve/{COMMIT}/"))
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif path.startswith(("/cdn/", "/folder/")):
                self._file(path.split("/", 2)[2])
            else:
                self._plain(404, b"")

        def do_HEAD(self) -> None:
            content = hub.files.get(unquote(urlsplit(self.path).path).split("/", 2)[-1])
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()

        def _tree(self, begin: int) -> None:
            listed: list[dict[str, object]] = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "sub"}]
            for path, content in sorted(hub.files.items()):
                entry: dict[str, object] = {"type": "file", "oid": blob_id(content), "size": len(content), "path": path}
                if len(content) >= LFS_FROM_BYTES:
                    entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 135}
                    entry["oid"] = blob_id(b"pointer")
                listed.append(entry)
            listed.append({"type": "file", "oid": blob_id(b""), "size": 0, "path": ".gitattributes"})
            following = (
                f'<{hub.url}{urlsplit(self.path).path}?cursor={begin + PAGE}>; rel="next"' if begin + PAGE < len(listed) else ""
            )
            self._json(listed[begin : begin + PAGE], {"Link": following} if following else {})

        def _modelscope(self, query: dict[str, list[str]]) -> None:
            if query["Revision"][0] not in (COMMIT, OTHER_COMMIT):
                self._json({"Code": 10010205001, "Message": "revision not found", "Data": None, "Success": False})
                return
            listed = [
                {"Path": path, "Name": path.rsplit("/", 1)[-1], "Type": "blob", "Size": len(content), "Sha256": sha256(content)}
                for path, content in sorted(hub.files.items())
            ]
            self._json({"Code": 200, "Success": True, "Data": {"Files": [{"Path": "sub", "Type": "tree", "Size": 0}, *listed]}})

        def _file(self, path: str) -> None:
            hub.asked.append((path, self.headers.get("Range")))
            if hub.statuses.get(path):
                status, wait = hub.statuses[path].pop(0)
                self._plain(status, b"busy", {"Retry-After": wait} if wait is not None else {})
                return
            content = hub.files.get(path)
            if content is None:
                self._plain(404, b"")
                return
            if hub.wrong.get(path):
                content = hub.wrong[path].pop(0)
            content = content[: hub.short.get(path, len(content))]
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not asked or hub.no_range:
                self._send(200, content, path, {})
            elif int(asked[1]) >= len(content):
                self._plain(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            else:
                begin, end = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else len(content), len(content))
                self._send(206, content[begin:end], path, {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"})

        def _send(self, status: int, content: bytes, path: str, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if hub.cut_at.get(path):
                self.wfile.write(content[: hub.cut_at[path].pop(0)])
                self.wfile.flush()
                # No lingering: the other end gets a reset, not an orderly end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
                return
            self.wfile.write(content)

        def _json(self, content: object, headers: dict[str, str] | None = None) -> None:
            self._plain(200, json.dumps(content).encode(), headers)

        def _plain(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().handle()

        def finish(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().finish()

    return Handler
