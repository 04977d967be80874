"""Facts that a driver change is planned from: the system, what apt would do, who holds its lock, what an earlier run left."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyinfra.api.facts import FactBase

from laoka.host.apt import LockHolder, Simulation, read_lock_holders, read_simulations, read_space
from laoka.stack.driver_change import Journal

FOLDER = "/var/lib/laoka/driver"
APT = "LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=5"
LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock")


@dataclass(frozen=True)
class Basics:
    """The release (ubuntu-24.04) and the running kernel; empty where it does not say."""

    release: str
    kernel: str

    def to_json(self) -> dict[str, object]:
        """For pyinfra's --json output."""
        return dict(vars(self))


class HostBasics(FactBase[Basics]):
    """Which release and kernel a host runs."""

    def command(self) -> str:
        return '. /etc/os-release; echo "release=$ID-$VERSION_ID"; echo "kernel=$(uname -r)"'

    def process(self, output: list[str]) -> Basics:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        return Basics(values.get("release", ""), values.get("kernel", ""))


class AptSimulations(FactBase[dict[str, Simulation]]):
    """What apt would do for each of several requests, all asked at once; nothing is changed, no lock is needed.

    With `preferences`, as if only these preferences were in force: for a plan that is made before they are written. The names
    in `also` are tried only where apt has a candidate for them, which one question tells for all.
    """

    default = dict

    def requires_command(
        self, requests: Mapping[str, Sequence[str]], preferences: str | None = None, also: Sequence[str] = ()
    ) -> str:
        return "apt-get"

    def command(self, requests: Mapping[str, Sequence[str]], preferences: str | None = None, also: Sequence[str] = ()) -> str:
        options = "-q -s -o Debug::NoLocking=1"
        script = "t=$(mktemp -d); trap 'rm -rf \"$t\"' EXIT; export LC_ALL=C; "
        if preferences is not None:
            script += f"printf %s {shlex.quote(preferences)} > $t/preferences; "
            options += " -o Dir::Etc::Preferences=$t/preferences -o Dir::Etc::PreferencesParts=$t/none"
        # In the background, each into a file of its own: apt takes seconds to weigh tens of thousands of packages.
        ask = f'{{ echo "@apt $1"; shift; apt-get {options} "$@" 2>&1; echo "@end $?"; }} > "$t/$(echo "$1" | tr -c a-z0-9- _)"'
        script += f"ask() {{ {ask}; }}; "
        for label, words in requests.items():
            script += f"ask {shlex.quote(label)} {' '.join(shlex.quote(word) for word in words)} & "
        if also:
            candidates = (
                f"apt-cache policy {' '.join(shlex.quote(name) for name in also)} 2>/dev/null | "
                'awk \'/^[^ ]/ { name = $1; sub(/:$/, "", name) } /^  Candidate:/ && $2 != "(none)" { print name }\''
            )
            script += f'for n in $({candidates}); do ask "install $n" install "$n" & done; '
        script += 'wait; cat "$t"/*_ 2>/dev/null; true'
        return f"sh -c {shlex.quote(script)}"

    def process(self, output: list[str]) -> dict[str, Simulation]:
        return read_simulations("\n".join(output))


class AptLockHolders(FactBase[tuple[LockHolder, ...]]):
    """Which processes hold the locks of apt and dpkg, by the kernel's own list of locks."""

    default = tuple

    def command(self) -> str:
        # A lock file is known by its inode; the process's open files confirm it, as inodes repeat over file systems.
        return (
            f"for f in {' '.join(LOCKS)}; do [ -e $f ] || continue; i=$(stat -c %i $f); "
            'awk -v i=$i \'$2 != "->" { n = split($6, a, ":"); if (a[n] == i) print $5 }\' /proc/locks 2>/dev/null | sort -u | '
            'while read -r p; do ls -l /proc/$p/fd 2>/dev/null | grep -qF -- "-> $f" && '
            'echo "$f $p $(cat /proc/$p/comm)"; done; done; true'
        )

    def process(self, output: list[str]) -> tuple[LockHolder, ...]:
        return read_lock_holders("\n".join(output))


@dataclass(frozen=True)
class Room:
    """Disk space that an installation needs and that there is, in bytes.

    `needs` None: apt did not say. `boot_free` None: /boot is no file system of its own.
    """

    needs: int | None
    free: int
    boot_free: int | None

    def to_json(self) -> dict[str, object]:
        """For pyinfra's --json output."""
        return dict(vars(self))


class AptRoom(FactBase[Room]):
    """What apt says that an installation takes on disk, and what is free."""

    def requires_command(self, packages: Sequence[str]) -> str:
        return "apt-get"

    def command(self, packages: Sequence[str]) -> str:
        names = " ".join(shlex.quote(name) for name in packages)
        options = "-q -o APT::Ignore-Hold=true --no-install-recommends --allow-downgrades --allow-change-held-packages"
        ask = f"{APT} {options} --assume-no install {names}"
        free = "df -PB1 {} | awk 'END {{ print \"{}=\" $4 }}'"
        own_boot = f'[ "$(stat -c %d /boot)" = "$(stat -c %d /)" ] || {free.format("/boot", "boot_free")}'
        return f"{free.format('/', 'free')}; {own_boot}; {ask} 2>&1 || true"

    def process(self, output: list[str]) -> Room:
        text = "\n".join(output)
        told = dict(re.findall(r"^(free|boot_free)=(\d+)$", text, re.MULTILINE))
        return Room(read_space(text), int(told.get("free", 0)), int(told["boot_free"]) if "boot_free" in told else None)


class ChangeJournal(FactBase[Journal]):
    """What an earlier run left of a driver change."""

    def command(self) -> str:
        return (
            f"test -e {FOLDER}/change/before && echo begun; sed 's/^/unit /' {FOLDER}/stopped 2>/dev/null; "
            f"sed 's/^/kernel /' {FOLDER}/change/kernel 2>/dev/null; true"
        )

    def process(self, output: list[str]) -> Journal:
        units = tuple(line.removeprefix("unit ").strip() for line in output if line.startswith("unit "))
        kernel = next((line.removeprefix("kernel ").strip() for line in output if line.startswith("kernel ")), "")
        return Journal("begun" in output, units, kernel)

    @staticmethod
    def default() -> Journal:
        return Journal()


class EnrolledKeys(FactBase[tuple[str, ...]]):
    """Names of the keys that the firmware trusts for modules, by mokutil; empty without it."""

    default = tuple

    def command(self) -> str:
        return "mokutil --list-enrolled 2>/dev/null | sed -n 's/.*Subject:.*CN *= *//p'; true"

    def process(self, output: list[str]) -> tuple[str, ...]:
        return tuple(line.split(",")[0].strip() for line in output if line.strip())


class Said(FactBase[tuple[int, str]]):
    """How the last step of a driver change ended: its exit status and last words; (-1, "") when there was none."""

    def command(self, step: str) -> str:
        path = f"{FOLDER}/change/{step}"
        room = f"$(df --output=avail -B1M {FOLDER} | tail -n 1)"
        # On a full disk its words are lost.
        full = f'[ -s {path}.log ] || [ "{room}" -gt 0 ] || echo "E: no space is left on the disk of {FOLDER}"'
        return f"cat {path}.status 2>/dev/null | grep . || echo -1; tail -n 40 {path}.log 2>/dev/null; {full}; true"

    def process(self, output: list[str]) -> tuple[int, str]:
        status = int(output[0]) if output and output[0].lstrip("-").isdigit() else -1
        return status, "\n".join(output[1:])

    @staticmethod
    def default() -> tuple[int, str]:
        return -1, ""


class BootId(FactBase[str]):
    """The kernel's id of this boot."""

    default = str

    def command(self) -> str:
        return "cat /proc/sys/kernel/random/boot_id"

    def process(self, output: list[str]) -> str:
        return output[0].strip() if output else ""
