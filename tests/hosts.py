"""What tests on sandbox hosts share: running pyinfra as a user would, and waiting for a condition with a deadline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder, Lab

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "/opt/laoka/agent/current/bin/python"
INVENTORY, FULL = "inventories/sandbox.py", "deploys/full.py"


@dataclass(frozen=True)
class Deployed:
    """What a run of pyinfra said, by its --json output."""

    status: int
    document: dict[str, Any] | None
    stderr: str

    def planned(self, host: str) -> list[str]:
        """Names of operations that would change `host`, in order."""
        assert self.document is not None, self.stderr
        return [item["name"] for item in self.document["plan"] if host in item["hosts_with_change"]]

    def changed(self, host: str) -> list[str]:
        """Names of operations that changed `host`, in order."""
        assert self.document is not None, self.stderr
        return [item["name"] for item in self.document["results"]["operations"] if host in item["success"]]

    @property
    def stopped_at(self) -> str:
        """The operation that a run came to last. Where no host remains, pyinfra prints this and no JSON."""
        started = re.findall(r"^--> Starting (?:serial )?operation: (.*?) *$", self.stderr, re.MULTILINE)
        return started[-1] if started else ""

    def failed(self, host: str) -> list[str]:
        """Names of operations that failed on `host` (those that did not run any more included)."""
        assert self.document is not None, self.stderr
        return [item["name"] for item in self.document["results"]["operations"] if host in item["error"]]


def environment(lab: Lab) -> dict[str, str]:
    return {**os.environ, "LAOKA_SANDBOX_LAB": lab.name, "LAOKA_SANDBOX_DIR": str(lab.state), "PYINFRA_PROGRESS": "off"}


def pyinfra_argv(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("pyinfra")), *arguments]


def pyinfra(lab: Lab, *arguments: str, deadline_s: float = 1500) -> Deployed:
    """Run pyinfra with --json. Arguments come before `inventory deploy`."""
    done = subprocess.run(
        pyinfra_argv("--json", *arguments), cwd=ROOT, env=environment(lab), capture_output=True, text=True, timeout=deadline_s
    )
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = None
    return Deployed(done.returncode, document, done.stderr)


def laoka(lab: Lab, *words: str, stdin: str = "", deadline_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the `laoka` command as an operator of the lab's hosts does, in English."""
    program = str(Path(sys.executable).with_name("laoka"))
    return subprocess.run(
        [program, "--lang", "en", *words],
        cwd=ROOT, env=environment(lab), input=stdin, capture_output=True, text=True, timeout=deadline_s,
    )  # fmt: skip


def until(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """Wait until `condition()` is true and return its value; fail with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"after {deadline_s} s still not: {what}"
        time.sleep(0.2)


def picture(host: HostFolder) -> str:
    """What a run would change: packages, holds, units, and every file of the places that roles write to."""
    script = (
        "dpkg-query -W; apt-mark showhold; systemctl list-unit-files --no-legend | grep -v transient; "
        "find /etc /opt /srv /usr/local /var/lib/laoka -xdev -not -path '/srv/laoka-sandbox*' -type f -printf '%p %T@ %s\\n' | sort"
    )
    return hosts.execute(host, script, check=False).stdout


def ask(host: HostFolder, port: int = 8080) -> dict[str, Any]:
    done = hosts.execute(
        host,
        f"{PYTHON} -m laoka.serving.completion ask --url http://127.0.0.1:{port} --model tiny-qwen3 --no-judge-text --json "
        "--api-key-file /etc/laoka/gateway-key",
        deadline_s=60,
    )
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    return found


def healthy(host: HostFolder) -> bool:
    return ask(host).get("kind") == "healthy"
