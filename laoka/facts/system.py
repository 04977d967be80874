"""Facts about packages, files and units of a host that pyinfra has not."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pyinfra.api.facts import FactBase

from laoka.serving.unit_config import config_hash_command


class AptHolds(FactBase[list[str]]):
    """Packages on hold, as `apt-mark showhold` lists them."""

    default = list

    def requires_command(self) -> str:
        return "apt-mark"

    def command(self) -> str:
        return "apt-mark showhold"

    def process(self, output: list[str]) -> list[str]:
        return sorted(line.strip() for line in output if line.strip())


class InstalledOf(FactBase[dict[str, str]]):
    """Which of the given packages (dpkg globs allowed) are installed, with their versions."""

    default = dict

    def requires_command(self, patterns: Sequence[str]) -> str:
        return "dpkg-query"

    def command(self, patterns: Sequence[str]) -> str:
        names = " ".join(shlex.quote(name) for name in patterns)
        return f"dpkg-query -W -f '${{db:Status-Status}} ${{Package}} ${{Version}}\\n' {names} 2>/dev/null || true"

    def process(self, output: list[str]) -> dict[str, str]:
        found = {}
        for line in output:
            words = line.split()
            if len(words) == 3 and words[0] == "installed":
                found[words[1]] = words[2]
        return found


class GlibcVersion(FactBase[str | None]):
    """The host's glibc, such as "2.36"; None when it has none."""

    def command(self) -> str:
        return "getconf GNU_LIBC_VERSION 2>/dev/null || true"

    def process(self, output: list[str]) -> str | None:
        words = output[0].split() if output else []
        return words[1] if len(words) == 2 and words[0] == "glibc" else None


class AptListsStale(FactBase[bool]):
    """Whether apt's lists are missing, older than a day, or older than the sources and preferences that they come from."""

    def command(self) -> str:
        # laoka-updated is touched only after an `apt-get update` that succeeded.
        return (
            "stamp=/var/lib/apt/lists/laoka-updated; "
            'if [ ! -e "$stamp" ] || [ -n "$(find "$stamp" -mmin +1440)" ] || '
            '[ -n "$(find /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/laoka.sources.d /etc/apt/apt.conf.d/50laoka '
            '/var/lib/laoka/apt -newer "$stamp" 2>/dev/null)" ]; '
            "then echo stale; else echo fresh; fi"
        )

    def process(self, output: list[str]) -> bool:
        return "fresh" not in output


class DebFolder(FactBase[tuple[str, str]]):
    """(what a folder of .debs holds now, as a hash; the hash that its index was made for); empty where there is none."""

    @staticmethod
    def default() -> tuple[str, str]:
        return "", ""

    def command(self, folder: str, place: str) -> str:
        listing = f"find -L {shlex.quote(folder)} -maxdepth 1 -name '*.deb' -printf '%f %s %T@\\n' 2>/dev/null | sort"
        return (
            f'found=$({listing}); [ -z "$found" ] && echo now= || echo "now=$(echo "$found" | sha256sum | cut -d " " -f 1)"; '
            f'echo "noted=$(head -n 1 {shlex.quote(place)}/stamp 2>/dev/null)"'
        )

    def process(self, output: list[str]) -> tuple[str, str]:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        return values.get("now", ""), values.get("noted", "")


class StampText(FactBase[str]):
    """The first line of a stamp file; empty when there is none."""

    default = str

    def command(self, path: str) -> str:
        return f"head -n 1 {shlex.quote(path)} 2>/dev/null || true"

    def process(self, output: list[str]) -> str:
        return output[0].strip() if output else ""


class ConfigNoted(FactBase[bool]):
    """Whether the hash in a stamp is that of these files and links as they are now; True for no paths at all."""

    def command(self, paths: Sequence[str], stamp: str) -> str:
        if not paths:
            return "echo same"
        return (
            f'[ "$( {config_hash_command(paths)} )" = "$(head -n 1 {shlex.quote(stamp)} 2>/dev/null)" ] && echo same || echo other'
        )

    def process(self, output: list[str]) -> bool:
        return "same" in output


class SameFiles(FactBase[bool]):
    """Whether the two files of each pair have the same content."""

    def command(self, pairs: Sequence[Sequence[str]]) -> str:
        tests = [f"cmp -s {shlex.quote(one)} {shlex.quote(other)}" for one, other in pairs]
        return f"{' && '.join(tests) or 'true'} && echo same || echo other"

    def process(self, output: list[str]) -> bool:
        return "same" in output


class MainPid(FactBase[int]):
    """Id of a unit's main process; 0 when it has none."""

    default = int

    def command(self, unit: str) -> str:
        return f"systemctl show -P MainPID {shlex.quote(unit)}"

    def process(self, output: list[str]) -> int:
        return int(output[0]) if output and output[0].strip().isdecimal() else 0


class SystemdVersion(FactBase[str]):
    """The first line of `systemctl --version`: "systemd 252 (252.39-1~deb12u2)"."""

    default = str

    def command(self) -> str:
        return "systemctl --version | head -n 1"

    def process(self, output: list[str]) -> str:
        return output[0].strip() if output else ""


class UnitFiles(FactBase[list[str]]):
    """Names of the unit files of /etc/systemd/system that match a pattern of the shell."""

    default = list

    def command(self, pattern: str) -> str:
        return f'cd /etc/systemd/system && for f in {pattern}; do [ -f "$f" ] && echo "$f"; done; true'

    def process(self, output: list[str]) -> list[str]:
        return sorted(line.strip() for line in output if line.strip())


class UnitsOutdated(FactBase[bool]):
    """Whether systemd knows one of these units (names and globs) otherwise than its files and drop-ins are by now.

    Its own answer, NeedDaemonReload, overlooks a drop-in whose folder is newer than its list of folders.
    """

    def command(self, units: Sequence[str]) -> str:
        names = " ".join(shlex.quote(unit) for unit in units)
        show = f"systemctl show -p Id -p LoadState -p NeedDaemonReload -p DropInPaths {names}"
        return f"{show}; echo drop-ins:; find /etc/systemd/system -mindepth 2 -maxdepth 2 -path '*.d/*.conf' -xtype f"

    def process(self, output: list[str]) -> bool:
        shown, _, files = "\n".join(output).partition("drop-ins:\n")
        there = [PurePosixPath(line) for line in files.splitlines()]
        units = (dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in shown.split("\n\n"))
        return any(_is_outdated(unit, there) for unit in units)


def _is_outdated(unit: Mapping[str, str], drop_ins: Sequence[PurePosixPath]) -> bool:
    """Whether systemd has read less of a unit, by its properties, than there is; `drop_ins`: those of all units."""
    if unit.get("NeedDaemonReload") == "yes":
        return True
    if unit.get("LoadState") != "loaded":
        return False
    name, at, rest = unit["Id"].partition("@")
    folders = {f"{unit['Id']}.d", f"{name}@.{rest.rpartition('.')[2]}.d"} if at else {f"{name}.d"}
    # By names alone: a drop-in of one instance takes the place of its template's of the same name.
    known = {PurePosixPath(path).name for path in unit.get("DropInPaths", "").split()}
    return any(path.parent.name in folders and path.name not in known for path in drop_ins)


class PathsOf(FactBase[list[str]]):
    """Files, links and folders that are there and match one of some patterns of the shell (absolute paths)."""

    default = list

    def command(self, patterns: Sequence[str]) -> str:
        return f'for f in {" ".join(patterns)}; do {{ [ -e "$f" ] || [ -L "$f" ]; }} && echo "$f"; done; true'

    def process(self, output: list[str]) -> list[str]:
        return sorted({line.rstrip("/") for line in output if line.strip()})


@dataclass(frozen=True)
class UnitState:
    """A systemd unit: whether it runs, is enabled and does its work, and the hash of the configuration it should run with."""

    active: bool
    enabled: bool
    config_sha256: str
    running_sha256: str
    works: bool

    def to_json(self) -> dict[str, object]:
        """For pyinfra's --json output."""
        return dict(vars(self))


# static: there is nothing to enable, others start it (udev does, for Ubuntu's nvidia-persistenced).
STARTED_AT_BOOT = ("enabled", "static", "indirect", "generated", "alias")


class UnitRuns(FactBase[UnitState]):
    """State of a unit against the files and links it is made of, and the hash laoka noted when it last started well."""

    def command(self, unit: str, paths: Sequence[str], stamp: str, test: str) -> str:
        quoted = shlex.quote(unit)
        # The test is asked only of a unit that runs: the answer is known otherwise, and some tests wait long for it.
        # In a shell of its own: one that ends by `exit 1` would end the question too.
        return (
            f"systemctl show -p ActiveState -p UnitFileState {quoted}; "
            f'echo "Config=$( {config_hash_command(paths)} )"; '
            f'echo "Noted=$(head -n 1 {shlex.quote(stamp)} 2>/dev/null)"; '
            f"systemctl -q is-active {quoted} && ( {test} ) >/dev/null 2>&1 && echo Works=yes || echo Works=no"
        )

    def process(self, output: list[str]) -> UnitState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        return UnitState(
            active=values.get("ActiveState") == "active",
            enabled=values.get("UnitFileState") in STARTED_AT_BOOT,
            config_sha256=values.get("Config", ""),
            running_sha256=values.get("Noted", ""),
            works=values.get("Works") == "yes",
        )
