"""HTTP over a Unix socket: how the gateway's parts on one host reach each other, and nobody else them."""

from __future__ import annotations

import http.client
import http.server
import os
import socket
import socketserver
from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a socket file."""

    def __init__(self, path: str | Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A server on a socket file, a thread for each connection. A file that an earlier run left is replaced."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, path: str | Path, handler: type[http.server.BaseHTTPRequestHandler], mode: int = 0o660) -> None:
        self._path = Path(path)
        self._path.unlink(missing_ok=True)
        super().__init__(str(path), handler)
        os.chmod(path, mode)  # noqa: PTH101 - the socket's own permissions are who may connect

    def get_request(self) -> tuple[socket.socket, str]:
        request, _ = super().get_request()
        return request, "local"  # a Unix socket has no address of the client; the handler wants something to show

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nothing to tell; what matters is in the access log."""
