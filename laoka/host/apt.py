"""What apt says that it would do (`apt-get -s`), and who holds its lock."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Simulation:
    """One `apt-get -s`: packages that it would install (also newer versions) and remove, by name; `refused` its complaint.

    `refused` is empty when apt would do it, even if there is nothing to do.
    """

    installs: tuple[tuple[str, str], ...] = ()
    removes: tuple[str, ...] = ()
    refused: str = ""

    def version(self, name: str) -> str | None:
        """The version of `name` that it would install."""
        return dict(self.installs).get(name)


def read_simulation(text: str, status: int) -> Simulation:
    """Out of the output of `apt-get -s` (standard output and errors together) and its exit status."""
    installs = tuple(re.findall(r"^Inst (\S+) (?:\[[^\]]*\] )?\((\S+)", text, re.MULTILINE))
    removes = tuple(re.findall(r"^(?:Remv|Purg) (\S+)", text, re.MULTILINE))
    if status == 0:
        return Simulation(installs, removes)
    lines = [line.strip() for line in text.splitlines()]
    said = [line.removeprefix("E: ") for line in lines if line.startswith("E: ")]
    # Why a package can't be installed stands above the error, one dependency a line.
    depends = [line for line in lines if re.match(r"\S+ : (Depends|PreDepends|Conflicts|Breaks)", line)]
    return Simulation((), (), "; ".join([*said, *depends][:4]) or f"apt-get ended with status {status}")


def read_simulations(text: str) -> dict[str, Simulation]:
    """Out of several simulations, each begun by `@apt LABEL` and ended by `@end STATUS`."""
    found = {}
    for label, body, status in re.findall(r"^@apt (.*)\n((?:(?!@end ).*\n)*)@end (\d+)$", text, re.MULTILINE):
        found[label] = read_simulation(body, int(status))
    return found


@dataclass(frozen=True)
class LockHolder:
    """A process that holds one of apt's or dpkg's locks."""

    path: str
    pid: int
    name: str


def read_lock_holders(text: str) -> tuple[LockHolder, ...]:
    """Out of `PATH PID NAME` lines."""
    rows = (line.split(maxsplit=2) for line in text.splitlines())
    return tuple(LockHolder(row[0], int(row[1]), row[2]) for row in rows if len(row) == 3 and row[1].isdigit())


def read_space(text: str) -> int | None:
    """Bytes that an installation needs on disk, downloads included, out of `apt-get --assume-no`; None when it does not say.

    apt prints powers of 1000 with a space and a unit: "Need to get 98.4 MB/120 MB of archives.", "After this operation,
    1,024 kB of additional disk space will be used."
    """
    get = re.search(r"^Need to get ([\d.,]+) ([kMGT]?B)(?:/\S+ [kMGT]?B)? of archives", text, re.MULTILINE)
    after = re.search(
        r"^After this operation, ([\d.,]+) ([kMGT]?B) (of additional disk space|disk space will be freed)", text, re.MULTILINE
    )
    if get is None and after is None:
        return None
    used = 0 if after is None or "freed" in after[3] else _bytes(after[1], after[2])
    return used + (_bytes(get[1], get[2]) if get else 0)


def _bytes(number: str, unit: str) -> int:
    return int(float(number.replace(",", "")) * 1000 ** "BkMGT".index(unit[0]))
