"""Stands for the outside world of a lab: takes the alerts that a watchdog posts, and serves the model files as a mirror does.

Run as `python -m laoka.sandbox.endpoint ADDRESS PORT ALERTS_FILE MIRROR_FOLDER`; `laoka sandbox up` does it in the background.
"""

from __future__ import annotations

import http.server
import json
import re
import sys
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

PORT = 9099
MAX_BODY_BYTES = 1024 * 1024


def make_handler(alerts: Path, mirror: Path) -> type[http.server.BaseHTTPRequestHandler]:
    """A request handler that appends each POST to `alerts` and serves files below `mirror`, resumable by Range."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = min(int(self.headers.get("Content-Length") or 0), MAX_BODY_BYTES)
            body = self.rfile.read(size).decode(errors="replace")
            try:
                content = json.loads(body)
            except ValueError:
                content = body
            record = {"received_unix_s": round(time.time(), 3), "path": self.path, "content": content}
            with alerts.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._answer(200, b"")

        def do_GET(self) -> None:
            path = (mirror / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
            if mirror.resolve() not in path.parents or not path.is_file():
                self._answer(404, b"no such file\n")
                return
            content = path.read_bytes()
            part = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if part and int(part[1]) < len(content):
                self._answer(206, content[int(part[1]) :], f"bytes {part[1]}-{len(content) - 1}/{len(content)}")
            else:
                self._answer(200, content)

        def _answer(self, status: int, content: bytes, content_range: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if content_range:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass  # the alerts file is the log

    return Handler


def read_alerts(file: Path) -> list[dict[str, object]]:
    """The alerts received so far, oldest first."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    handler = make_handler(Path(sys.argv[3]), Path(sys.argv[4]))
    http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), handler).serve_forever()
