"""What a throw-away host inherits from this machine: package sources, pip settings, proxies and certificates."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from laoka.process import run

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy")


@dataclass(frozen=True)
class AptSource:
    """One archive: its address, suites and components."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        return tuple(f"deb {self.uri} {suite} {' '.join(self.components)}" for suite in self.suites)


def parse_deb822(text: str) -> tuple[AptSource, ...]:
    """Read apt sources in deb822 form (`*.sources`). Paragraphs that are disabled or not for `deb` are left out."""
    found = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line[:1].isspace() and name:
                fields[name] += " " + line.strip()
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        for uri in fields.get("uris", "").split():
            found.append(AptSource(uri, tuple(fields.get("suites", "").split()), tuple(fields.get("components", "").split())))
    return tuple(found)


def parse_one_line(text: str) -> tuple[AptSource, ...]:
    """Read apt sources in one-line form (`sources.list`)."""
    found = []
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s*(.*)", line.split("#")[0].strip())
        if match:
            found.append(AptSource(match[1], (match[2],), tuple(match[3].split())))
    return tuple(found)


def debian_sources(suite: str, etc_apt: Path = Path("/etc/apt")) -> tuple[AptSource, ...]:
    """This machine's own archives for Debian `suite` (its updates and security included), main component only.

    Empty on a machine that is not Debian `suite`: debootstrap then takes its own default mirror.
    """
    sources: list[AptSource] = []
    for path in [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]:
        if path.is_file():
            parse = parse_deb822 if path.suffix == ".sources" else parse_one_line
            sources += parse(path.read_text(errors="replace"))
    wanted = []
    for source in sources:
        suites = tuple(name for name in source.suites if name == suite or name.startswith(f"{suite}-"))
        if suites and "main" in source.components:
            wanted.append(AptSource(source.uri, suites, ("main",)))
    return tuple(wanted)


def proxies(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The proxy variables in force here, under their lower-case names."""
    return {name: value for name in PROXY_VARIABLES if (value := env.get(name) or env.get(name.upper()))}


@dataclass(frozen=True)
class PipSettings:
    """pip's settings in force here: the text of a pip.conf, and the local files and folders that it points to."""

    conf: str
    paths: tuple[Path, ...]


def parse_pip_config(listing: str) -> PipSettings:
    """Turn the output of `pip config list` into one pip.conf for a host.

    Later lines win as in pip itself (global, user, site, environment). The cache folder and the log are left out: they
    belong to a machine. Local paths (find-links, constraints, file:// indexes) are collected so that they can be shared.
    """
    values: dict[str, str] = {}
    for line in listing.splitlines():
        match = re.match(r"([^.=]+)\.([\w-]+(?:\.[\w-]+)?)=(?:'(.*)'|(.*))$", line.replace(":env:.", "env."))
        if match and match[1] in ("global", "user", "site", "env", "install"):
            values[match[2]] = (match[3] if match[3] is not None else match[4]).replace("\\n", " ")
    for unwanted in ("cache-dir", "log", "disable-pip-version-check", "config-file"):
        values.pop(unwanted, None)
    paths = []
    for value in values.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists() and str(path) != CA_BUNDLE:
                # the pages of a file:// index point to files beside it
                paths.append(path.parent if word.startswith("file://") else path)
    conf = "[global]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(values.items()))
    return PipSettings(conf, tuple(dict.fromkeys(paths)))


def pip_settings() -> PipSettings:
    """pip's settings in force on this machine."""
    listing = run([sys.executable, "-m", "pip", "config", "list"], deadline_s=30, check=True)
    return parse_pip_config(listing.stdout)
