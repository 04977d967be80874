"""Packages of a host as far as they touch the driver and the kernel: versions, holds, pins, unattended upgrades, candidates."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread


@dataclass(frozen=True)
class Package:
    """An installed package; `status` is dpkg's short form (`ii`, `hi`, `iF`, ...), `rpm` on RPM systems."""

    name: str
    version: str
    status: str

    @property
    def broken(self) -> bool:
        """dpkg began with it and did not end."""
        return self.status != "rpm" and len(self.status) > 1 and self.status[1] not in "inc"


@dataclass(frozen=True)
class Preference:
    """One stanza of apt's preferences."""

    file: str
    packages: tuple[str, ...]
    pin: str
    priority: int


@dataclass(frozen=True)
class UnattendedUpgrades:
    """`enabled`: apt's timer runs it. `blacklist`: patterns of packages it leaves alone."""

    enabled: bool
    blacklist: tuple[str, ...]
    reboots: bool


@dataclass(frozen=True)
class Candidate:
    """What `apt-cache policy` says of one package; None where there is none."""

    package: str
    installed: str | None
    candidate: str | None


@dataclass(frozen=True)
class Packages:
    """All of them; parts that a distribution does not have are Unread with that reason."""

    installed: Maybe[tuple[Package, ...]]
    holds: Maybe[tuple[str, ...]]
    preferences: Maybe[tuple[Preference, ...]]
    unattended: Maybe[UnattendedUpgrades]
    candidates: Maybe[tuple[Candidate, ...]]
    nvidia_sources: Maybe[tuple[str, ...]]

    def version(self, name: str) -> str | None:
        """The installed version of a package, None when it is not installed or the list is unread."""
        if isinstance(self.installed, Unread):
            return None
        return next((package.version for package in self.installed if package.name == name), None)


def read_packages(sections: Sections) -> Packages:
    """From the sections packages, rpms, holds, apt-preferences, apt-config, apt-policy and apt-sources."""
    preferences, config = sections.output("apt-preferences"), sections.output("apt-config")
    policy, sources, holds = sections.output("apt-policy"), sections.output("apt-sources"), sections.output("holds")
    return Packages(
        installed=_installed(sections),
        holds=holds if isinstance(holds, Unread) else _holds(holds),
        preferences=preferences if isinstance(preferences, Unread) else read_preferences(preferences),
        unattended=config if isinstance(config, Unread) else read_apt_config(config),
        candidates=policy if isinstance(policy, Unread) else read_policy(policy),
        nvidia_sources=sources
        if isinstance(sources, Unread)
        else tuple(
            line.partition(":")[2].strip() for line in sources.splitlines() if not line.partition(":")[2].strip().startswith("#")
        ),
    )


def _installed(sections: Sections) -> Maybe[tuple[Package, ...]]:
    section = sections.section("packages")
    if not isinstance(section, Unread):
        # dpkg-query ends with 1 when one of the patterns fits nothing.
        if section.status not in (0, 1) or section.timed_out:
            return Unread("dpkg-query failed")
        found = []
        for line in section.stdout.splitlines():
            words = line.split()
            if len(words) >= 3 and words[2][1:2] not in ("n", "c", ""):
                found.append(Package(words[0].partition(":")[0], words[1], words[2]))
        return tuple(found)
    rpms = sections.output("rpms")
    if isinstance(rpms, Unread):
        return section
    return tuple(Package(words[0], words[1], "rpm") for line in rpms.splitlines() if len(words := line.split()) >= 2)


def _holds(text: str) -> tuple[str, ...]:
    """Names out of `dpkg --get-selections` or `apt-mark showhold`."""
    return tuple(line.split()[0].partition(":")[0] for line in text.splitlines() if line.strip())


def read_preferences(text: str) -> tuple[Preference, ...]:
    """Stanzas out of `FILE:LINE` lines; a line without text ends a stanza."""
    stanzas: list[tuple[str, dict[str, str]]] = []
    for line in text.splitlines():
        file, _, content = line.partition(":")
        content = content.strip()
        if not stanzas or stanzas[-1][0] != file or not content:
            stanzas.append((file, {}))
        if content and not content.startswith("#"):
            key, _, value = content.partition(":")
            stanzas[-1][1][key.strip().lower()] = value.strip()
    found = []
    for file, fields in stanzas:
        priority = fields.get("pin-priority", "")
        if fields.get("package") and re.fullmatch(r"-?\d+", priority):
            found.append(Preference(file, tuple(fields["package"].split()), fields.get("pin", ""), int(priority)))
    return tuple(found)


def read_apt_config(text: str) -> UnattendedUpgrades:
    """Out of `apt-config dump`."""
    values = re.findall(r'^(\S+) "(.*)";$', text, re.MULTILINE)
    periodic = dict(values)
    return UnattendedUpgrades(
        enabled=periodic.get("APT::Periodic::Unattended-Upgrade", "0") not in ("0", ""),
        blacklist=tuple(v for k, v in values if k == "Unattended-Upgrade::Package-Blacklist::" and v),
        reboots=periodic.get("Unattended-Upgrade::Automatic-Reboot", "false").lower() in ("true", "1", "yes"),
    )


def read_policy(text: str) -> tuple[Candidate, ...]:
    """Out of `apt-cache policy NAME...`."""
    found = []
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        head = re.match(r"(\S+):\n\s+Installed: (\S+)\n\s+Candidate: (\S+)", block)
        if head:
            found.append(Candidate(head[1], *(None if word == "(none)" else word for word in (head[2], head[3]))))
    return tuple(dict.fromkeys(found))
