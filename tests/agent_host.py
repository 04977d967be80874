"""The watchdog as a process of its own, and the alert endpoint of a test: what tests of the real daemon share."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laoka.sandbox import card

BDF = "0000:03:00.0"
SECRET = "s3cr3t-token"


def until(condition: Callable[[], Any], deadline_s: float = 40.0) -> Any:
    """The first true value of the condition; what it is at the deadline otherwise."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if found := condition():
            return found
        time.sleep(0.02)
    return condition()


class Endpoint:
    """Where alerts arrive; answers 500 while `broken`."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.asked = 0
        self.broken = False
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked += 1
                if not endpoint.broken:
                    endpoint.got.append(body | {"received_s": time.monotonic()})
                self.send_response(500 if endpoint.broken else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def titles(self) -> list[str]:
        return [alert["title"] for alert in self.got]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Host:
    """A host with a simulated card, and the daemon on it."""

    def __init__(self, folder: Path, endpoint: Endpoint, run: Path | None = None) -> None:
        """`run` is what /run is on a real host; None: in the host's own folder."""
        self.folder = folder
        self.run = run or folder / "run"
        self.endpoint = endpoint
        self.gpu = folder / "gpu"
        card.create(self.gpu, (card.v100_pcie_32gb(BDF),))
        self.port = free_port()
        (folder / "urls").write_text(f"# the phone\n{endpoint.url}\n")
        self.config = folder / "watchdog.toml"
        self.log = folder / "journal"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.settimeout(30)
        self.child: subprocess.Popen[bytes] | None = None
        self.gpus: tuple[tuple[str, str, str], ...] = ((BDF, "10de:1db6", "top"),)
        """Address, device id and slot of each card that the settings expect."""
        self.configure()

    def configure(self, **changes: str) -> None:
        values = {
            "host": '"box-7"',
            "simulated": "true",
            "sysfs_root": f'"{self.gpu}/sys"',
            "kernel_log": f'"{self.gpu}/kmsg"',
            "state_dir": f'"{self.folder}/state"',
            "state_file": f'"{self.run}/watchdog.json"',
            "metrics_address": f'"127.0.0.1:{self.port}"',
            "metrics_file": f'"{self.run}/metrics.prom"',
            "alert_urls_file": f'"{self.folder}/urls"',
            "nvml": '"off"',
            "unit": '""',
            "recovered_after_s": "0.5",
            "pci_interval_s": "0.2",
        } | changes
        lines = [f"{key} = {value}" for key, value in values.items()]
        for bdf, device_id, slot in self.gpus:
            lines += ["[[gpu]]", f'bdf = "{bdf}"', f'device_id = "{device_id}"', f'slot = "{slot}"']
        self.config.write_text("\n".join([*lines, ""]))

    def start(self, argv: list[str] | None = None, **more: str) -> None:
        environment = {**os.environ, "WATCHDOG_USEC": "900000", **more, "NOTIFY_SOCKET": str(self.folder / "notify")}
        environment.pop("CREDENTIALS_DIRECTORY", None)
        with self.log.open("ab") as log:
            whole = [*(argv or [sys.executable, "-m", "laoka.agent"]), "--config", str(self.config)]
            self.child = subprocess.Popen(whole, stderr=log, env=environment)
        while "READY=1" not in self.heard():
            pass

    def heard(self) -> list[str]:
        """The next message to systemd. Errors: TimeoutError with the daemon's log."""
        try:
            return self.socket.recv(4096).decode().split("\n")
        except TimeoutError:
            raise TimeoutError(self.log.read_text()) from None

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait(5)
            self.child = None

    @property
    def state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run / "watchdog.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / "state/incidents").glob("*.json"))]

    def append(self, text: str) -> None:
        with (self.gpu / "kmsg").open("a") as stream:
            stream.write(text)


class Kernel:
    """Does what a write of 1 to `remove` and `rescan` does; `returns` says whether a card is there again after a rescan."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.returns = True
        self.log: list[str] = []
        self._stop = threading.Event()
        self._devices = root / "sys/bus/pci/devices"
        (root / "sys/bus/pci/rescan").write_text("")
        self._kept: dict[str, Path] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(0.02):
            for entry in list(self._devices.iterdir()):
                asked = entry / "remove"
                if asked.exists() and asked.read_text().strip() == "1":
                    asked.write_text("")
                    self.log.append(f"remove {entry.name}")
                    self._kept[entry.name] = entry.readlink() if entry.is_symlink() else entry
                    entry.unlink()
            rescan = self.root / "sys/bus/pci/rescan"
            if rescan.read_text().strip() == "1":
                rescan.write_text("")
                self.log.append("rescan")
                if self.returns:
                    for name, target in self._kept.items():
                        (self._devices / name).symlink_to(target)
                        config = self._devices / name / "config"
                        config.write_bytes(bytes.fromhex("de10b61d") + bytes(4092))
                    self._kept.clear()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2)


class HttpService:
    """Answers every request alike and keeps what came; `wanted` is for a test that turns requests here: where they were to go."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.wanted: list[str] = []
        self.status = 200
        self.answer: dict[str, Any] | str = {}
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                service.got.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
                data = (service.answer if isinstance(service.answer, str) else json.dumps(service.answer)).encode()
                self.send_response(service.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
