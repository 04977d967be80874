"""The host of a measured server, over SSH or this machine: its flags, its metrics, its cards, and other flags for a while.

Other flags come by way of a drop-in under /run that lays a changed copy over the unit's configuration: nothing of the deploy is
touched, a reboot forgets it, and `restore` takes it away whatever happened.
"""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from laoka.host import nvidia_smi
from laoka.host.collect import SshTarget, ssh_argv
from laoka.host.nvidia_smi import Smi
from laoka.host.unread import Unread
from laoka.process import Completed, run
from laoka.serving.bench.client import version_of

UNIT = "qwen-serve.service"
CONFIG = "/etc/qwen-serve/vllm.yaml"
OVERLAY = "/run/laoka-bench"
DROP_IN = f"/run/systemd/system/{UNIT}.d/90-laoka-bench.conf"
NO_CONFIG = f"{CONFIG} can't be read: is {UNIT} deployed there?"
SAMPLE_S = 2.0
_LINE = re.compile(r"^([a-z][\w-]*): *(.*)$")
# An nvidia-smi that hangs in the driver must not be joined by a second one.
_SMI = "ps -eo stat=,comm= | grep -q '^D.*nvidia-smi' && exit 3; timeout -k 1 7 nvidia-smi -q -x"


class HostError(Exception):
    """The host did not do what was asked; the message is one line."""


@dataclass(frozen=True)
class HostSide:
    """A host. `ssh` None: this machine."""

    ssh: SshTarget | None

    @property
    def name(self) -> str:
        return self.ssh.name if self.ssh else "@local"

    def sh(self, script: str, deadline_s: float, stop: threading.Event | None = None) -> Completed:
        """Run a shell script there, as root where sudo asks for no password."""
        argv = ssh_argv(self.ssh) if self.ssh else ("sh", "-s")
        return run(argv, stdin=script, deadline_s=deadline_s, stop=stop, max_output_bytes=16 * 1024 * 1024)

    def must(self, script: str, what: str, deadline_s: float) -> str:
        """The same; what it printed. Errors: HostError."""
        done = self.sh(script, deadline_s)
        if not done.ok:
            reason = "passed its deadline" if done.timed_out else done.last_line()
            raise HostError(f"{self.name}: {what}: {reason}")
        return done.stdout

    def flags(self) -> dict[str, Any]:
        """Flags of the served model, as its configuration has them now. Errors: HostError."""
        overlaid = f"{OVERLAY}/vllm.yaml"
        text = self.must(
            f"if [ -f {DROP_IN} ]; then cat {overlaid}; else cat {CONFIG}; fi",
            NO_CONFIG,
            30,
        )
        return parse_flags(text)

    def metrics(self, port: int) -> str:
        """/metrics of the engine on the host's loopback; empty when it does not answer."""
        return self.sh(f"curl -sf -m 10 http://127.0.0.1:{int(port)}/metrics", 30).stdout

    def version(self, port: int) -> str | None:
        """The engine's version as it tells on the host's loopback (a gateway lets no such question through); None: no answer."""
        return parse_version(self.sh(f"curl -sf -m 10 http://127.0.0.1:{int(port)}/version", 30).stdout)

    @contextmanager
    def changes(self, start_deadline_s: float, say: Callable[[str], None]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Gives a function that restarts the unit with changed flags (None takes one away); at the end it is as it was before.

        Errors: HostError when it does not start with them; then, too, the flags are back as they were.
        """
        before = in_force = parse_flags(self.must(f"cat {CONFIG}", NO_CONFIG, 30))

        def change(flags: Mapping[str, Any]) -> None:
            nonlocal in_force
            wanted = changed(before, flags)
            if wanted == in_force:
                return
            say(f"{self.name}: {UNIT} restarts with {told(flags)}")
            in_force = wanted
            self.must(apply_script(wanted), f"{UNIT} did not start with {told(flags)}", start_deadline_s)

        try:
            yield change
        finally:
            if in_force != before:
                say(f"{self.name}: {UNIT} restarts as it was")
                self.must(restore_script(), f"{UNIT} did not start as it was: systemctl status {UNIT}", start_deadline_s)


def parse_version(text: str) -> str | None:
    """The version in an answer to /version; None for what is none."""
    try:
        return version_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def parse_flags(text: str) -> dict[str, Any]:
    """The flags of a vllm.yaml as laoka writes it: `key: JSON value` a line, # for comments."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            try:
                found[match[1]] = json.loads(match[2])
            except ValueError:
                found[match[1]] = match[2]
    return found


def changed(flags: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Flags with changes; a change to None takes the flag away."""
    merged = {**flags, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def told(changes: Mapping[str, Any]) -> str:
    """Changes in words for a person."""
    words = [f"no {key}" if value is None else f"{key} {value}" for key, value in changes.items()]
    return ", ".join(words) or "the same flags"


def render_flags(flags: Mapping[str, Any]) -> str:
    """A vllm.yaml of flags."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in flags.items()]
    return "# laoka bench: for the time of a measurement.\n" + "".join(lines)


def apply_script(flags: Mapping[str, Any]) -> str:
    """Shell text that restarts the unit with these flags; the unit is Type=notify, so it comes back when a completion did."""
    drop_in = f"[Service]\nBindReadOnlyPaths={OVERLAY}/vllm.yaml:{CONFIG}\n"
    return (
        "set -e\n"
        f"mkdir -p {OVERLAY} {DROP_IN.rpartition('/')[0]}\nchmod 755 {OVERLAY}\n"
        f"printf %s {shlex.quote(render_flags(flags))} > {OVERLAY}/vllm.yaml\nchmod 644 {OVERLAY}/vllm.yaml\n"
        f"printf %s {shlex.quote(drop_in)} > {DROP_IN}\n"
        f"systemctl daemon-reload\nsystemctl restart {UNIT}\n"
    )


def restore_script() -> str:
    """Shell text that takes the drop-in away and restarts the unit."""
    folder = DROP_IN.rpartition("/")[0]
    return (
        f"rm -f {DROP_IN} {OVERLAY}/vllm.yaml\nrmdir {folder} {OVERLAY} 2>/dev/null\n"
        f"systemctl daemon-reload && systemctl restart {UNIT}\n"
    )


@dataclass
class CardWatch:
    """Samples the host's cards while something runs; `samples` is what came, `trouble` why nothing did. Use it with `with`."""

    host: HostSide
    every_s: float = SAMPLE_S
    samples: list[Smi] = field(default_factory=list)
    trouble: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> CardWatch:
        self._thread = threading.Thread(target=self._watch, name="cards", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(15)

    def _watch(self) -> None:
        while not self._stop.is_set():
            done = self.host.sh(_SMI, 15, self._stop)
            if self._stop.is_set() and not done.ok:
                return
            listing = nvidia_smi.read_xml(done.stdout, done.stderr) if done.ok else Unread(done.last_line())
            if isinstance(listing, Unread):
                self.trouble = "an nvidia-smi already hangs in the driver" if done.status == 3 else listing.reason
            else:
                self.samples.append(listing)
            self._stop.wait(self.every_s)
