"""Where the sandbox keeps its state: labs (groups of throw-away hosts), their folders, and what they changed on this machine."""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from laoka.files import write_atomic

DEFAULT_STATE = Path("/var/lib/laoka-sandbox")
DEFAULT_LAB = "demo"
# Each lab has a /24 of its own, so that tests and a demo can stand side by side. 10.77 is private address space.
LAB_NETWORKS = {"demo": "10.77.0", "tests": "10.77.1", "ops": "10.77.2"}
OTHER_NETWORKS = range(16, 250)
"""Third numbers of the networks of labs with other names: each is chosen by its name."""


class SandboxError(Exception):
    """The sandbox can't do what was asked; the message is one line that says what to do next."""


@dataclass(frozen=True)
class Lab:
    """One group of throw-away hosts with its own folder, bridge and /24."""

    name: str
    state: Path

    @property
    def folder(self) -> Path:
        return self.state / "labs" / self.name

    @property
    def prefix(self) -> str:
        """The first three numbers of the lab's network."""
        if self.name in LAB_NETWORKS:
            return LAB_NETWORKS[self.name]
        return f"10.77.{OTHER_NETWORKS[zlib.crc32(self.name.encode()) % len(OTHER_NETWORKS)]}"

    @property
    def bridge(self) -> str:
        return f"lk-{self.name}"

    @property
    def gateway(self) -> str:
        """This machine's own address on the lab's bridge."""
        return f"{self.prefix}.254"

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def alerts(self) -> Path:
        """What the lab's alert endpoint received, one JSON object a line."""
        return self.folder / "alerts.jsonl"

    @property
    def alert_urls(self) -> Path:
        """Where the lab's watchdogs send alerts: one apprise address a line."""
        return self.folder / "alert-urls"

    @property
    def gateway_keys(self) -> Path:
        """Keys of the lab's gateways: one, called `lab`."""
        return self.folder / "gateway-keys"

    @property
    def mirror(self) -> Path:
        """What the lab's endpoint serves as a model mirror would."""
        return self.folder / "mirror"

    @property
    def cache(self) -> Path:
        """Downloads kept for the next run; shared by all labs and not removed by `down`."""
        return self.state / "cache"

    def host(self, number: int) -> HostFolder:
        return HostFolder(self, number)


@dataclass(frozen=True)
class HostFolder:
    """One throw-away host: its names, its address and the files it consists of."""

    lab: Lab
    number: int

    @property
    def name(self) -> str:
        return f"v100-{self.number}"

    @property
    def machine(self) -> str:
        """The name for systemd-nspawn; with `vb-` before it, it must fit in an interface name's 15 characters."""
        return f"lk-{self.lab.name}-{self.number}"

    @property
    def interface(self) -> str:
        """The host's end on the lab's bridge, as systemd-nspawn names it."""
        return f"vb-{self.machine}"

    @property
    def address(self) -> str:
        return f"{self.lab.prefix}.{self.number}"

    @property
    def folder(self) -> Path:
        return self.lab.folder / self.name

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def card(self) -> Path:
        """State of the simulated card, seen by the host as /srv/laoka-sandbox."""
        return self.folder / "card"

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    @property
    def record(self) -> Path:
        return self.folder / "host.json"


def open_lab(name: str | None = None, state: Path | None = None) -> Lab:
    """The lab called `name` (default: $LAOKA_SANDBOX_LAB, else "demo") under `state` (default: $LAOKA_SANDBOX_DIR).

    Errors: SandboxError for a name that can't be one, or whose network another lab has.
    """
    wanted = name or os.environ.get("LAOKA_SANDBOX_LAB") or DEFAULT_LAB
    if not re.fullmatch(r"[a-z][a-z0-9]{0,5}", wanted):
        raise SandboxError(f"no sandbox lab can be called {wanted!r}: take 1 to 6 lower-case letters and digits, such as demo")
    opened = Lab(wanted, state or Path(os.environ.get("LAOKA_SANDBOX_DIR", DEFAULT_STATE)))
    for folder in sorted((opened.state / "labs").glob("*")):
        if folder.name != wanted and Lab(folder.name, opened.state).prefix == opened.prefix:
            raise SandboxError(f"lab {wanted} would have the network of lab {folder.name}, which is up: take another name")
    return opened


def hosts(lab: Lab) -> tuple[HostFolder, ...]:
    """The hosts that a lab has now, by number."""
    numbers = sorted(int(record.parent.name.removeprefix("v100-")) for record in lab.folder.glob("v100-*/host.json"))
    return tuple(lab.host(number) for number in numbers)


@dataclass(frozen=True)
class Changes:
    """What the labs changed on this machine outside their folders, so that `down` can undo it, also after a crash.

    `sysctls` holds the values found before; `labs` the labs that still need the changes.
    """

    labs: tuple[str, ...] = ()
    sysctls: tuple[tuple[str, str], ...] = ()
    mounted_nspawn_tmpfs: bool = False


def read_changes(state: Path) -> Changes:
    try:
        data = json.loads((state / "machine.json").read_text())
    except FileNotFoundError:
        return Changes()
    return Changes(tuple(data["labs"]), tuple((k, v) for k, v in data["sysctls"]), data["mounted_nspawn_tmpfs"])


def write_changes(state: Path, changes: Changes) -> None:
    write_atomic(state / "machine.json", json.dumps(asdict(changes)))


@contextmanager
def machine_lock(state: Path) -> Iterator[None]:
    """Hold the sandbox's lock: two commands must not change this machine's network at the same time."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
