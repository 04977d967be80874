"""Redaction of a probe: names, addresses, serial numbers and secrets become pseudonyms that are the same all through.

The pseudonyms keep the shape of what they stand for, so that a parser reads them as before, and are numbered in the
order of appearance, so that nothing of the original can be computed from them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from laoka.host.sections import Section, Sections

# Words that are host or user names often enough, and that mean something else wherever they stand in machine output.
_COMMON_WORDS = frozenset(
    """root ubuntu debian fedora centos rocky linux localhost kernel nvidia server host node gpu cuda docker systemd vm user
    admin test none nobody daemon sys proc dev usr lib boot mnt srv opt home var tmp run etc log data model python
    container pci pcieport generic main system lab box pc intel amd tesla""".split()  # noqa: SIM905 - words, as prose
)
# Hosts whose names say nothing about the owner, and which checks look at.
_PUBLIC_HOSTS = ("nvidia.com", "ubuntu.com", "debian.org", "github.com", "githubusercontent.com", "kernel.org", "freedesktop.org")
_UNIT_SUFFIX = re.compile(r"\.(service|socket|mount|timer|slice|scope|target|device|swap|path)$")


@dataclass
class Pseudonyms:
    """The pseudonyms given so far: by kind, then by what they replace. One object serves one capture."""

    given: dict[str, dict[str, str]] = field(default_factory=dict)

    def of(self, kind: str, original: str, form: Callable[[int], str]) -> str:
        """The pseudonym of `original`, new ones in `form` of their number."""
        known = self.given.setdefault(kind, {})
        key = original.lower()
        if key not in known:
            known[key] = form(len(known) + 1)
        return known[key]

    @property
    def counts(self) -> dict[str, int]:
        """How many different originals of each kind were replaced."""
        return {kind: len(known) for kind, known in sorted(self.given.items())}


_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*(?:PRIVATE KEY|CERTIFICATE)-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL)
_PUBLIC_KEY = re.compile(r"\b(ssh-(?:rsa|ed25519|dss)|ecdsa-sha2-\S+) AAAA[0-9A-Za-z+/=]+(?: \S+)?")
_URL_SECRET = re.compile(r"(\w+://)([^\s/:@]+)(?::([^\s/@]*))?@")
_URL_HOST = re.compile(r"(\w+://)((?:[\w-]+\.)+[a-zA-Z]{2,}|[\w-]+)(?=[:/\s]|$)")
_NAMED_SECRET = re.compile(
    r"((?:[\w-]*(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|credential)s?|authorization|bearer)"
    r"[\"']?(?:\s*[=:]\s*|\s+)(?:bearer\s+|basic\s+)?[\"']?)([^\s\"',;<>]+)",
    re.IGNORECASE,
)
_SHAPED_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abp]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|(?=\w*[a-z])(?=\w*[A-Z])(?=\w*\d)[A-Za-z0-9]{32,})\b"
)
_UUID = re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![0-9a-zA-Z])", re.IGNORECASE)
_SHORT_UUID = re.compile(r"(UUID=|by-uuid/)([0-9A-F]{4}-[0-9A-F]{4}|[0-9A-F]{16})\b", re.IGNORECASE)
_LONG_HEX = re.compile(r"(?<![0-9a-zA-Z_])[0-9a-f]{32,}(?![0-9a-zA-Z_])", re.IGNORECASE)
_MAC = re.compile(r"(?<![0-9a-f:.-])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![0-9a-f:])", re.IGNORECASE)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:(?:[0-9a-f]{1,4}:){1,7}(?::[0-9a-f]{1,4}){1,7}|(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4})(?![\w:])", re.IGNORECASE
)
_SERIAL = re.compile(
    r"(<(?:serial|chassis_serial_number|pdi|board_serial|gpu_fabric_guid|slot_number)>"
    r"|(?:Serial(?: Number| No\.?)?|Asset Tag|SKU Number|PDI)\s*: *|(?:serial|serialno|wwn|SERIAL)=|by-id/)"
    r"([^\s<|,][^<|,\n]*?)(?=\s*(?:<|\||,|$))",
    re.MULTILINE,
)
_NO_SERIAL = re.compile(r"(N/A|Not Specified|None|Unknown|Default string|To Be Filled.*|--|0+|)\s*", re.IGNORECASE)
_HOME = re.compile(r"/(?:home|Users)/([^/\s:]+)")
_SESSION_USER = re.compile(r"\b(?:of|for) [Uu]ser ([\w.-]+?)(?=\.?(?:\s|$))")
_LOGIN = re.compile(r"(?<![\w.+/-])([A-Za-z][\w.+-]*)@([A-Za-z0-9][\w.-]*)")
_NETWORK_MOUNT = re.compile(r"^(//|(?=[\w.-]+:/))([\w.-]+)", re.MULTILINE)
_LOG_HOST = re.compile(
    r"^((?:\d{9,}\.\d+|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) )(\S+)(?= [\w.()/-]+(?:\[\d+\])?: )",
    re.MULTILINE,
)


def redact(sections: Sections) -> tuple[Sections, dict[str, int]]:
    """The same sections without what tells who and where; and how many different things of each kind were replaced."""
    names = Pseudonyms()
    learnt = _names_in(sections, names)
    cleaned = {name: _section(section, names, learnt) for name, section in sections.by_name.items()}
    skipped = {name: _text(reason, names, learnt) for name, reason in sections.skipped.items()}
    return dataclasses.replace(sections, by_name=cleaned, skipped=skipped), names.counts


def _names_in(sections: Sections, names: Pseudonyms) -> Mapping[str, str]:
    """Host and user names that the sections give away somewhere, with their pseudonyms, to be replaced everywhere."""
    learnt: dict[str, str] = {}

    def learn(word: str, kind: str) -> None:
        if len(word) >= 3 and word.lower() not in _COMMON_WORDS and not word.isdecimal():
            learnt[word] = names.of(kind, word, lambda number: f"{kind}-{number}")

    for name, section in sections.by_name.items():
        everything = f"{section.stdout}\n{section.stderr}"
        if name == "uname" and len(section.stdout.split()) > 1:
            full = section.stdout.split()[1]
            learn(full, "host")
            learn(full.split(".")[0], "host")
        for found in _HOME.finditer(everything):
            learn(found[1], "user")
        for found in _SESSION_USER.finditer(everything):
            learn(found[1], "user")
        for found in _LOG_HOST.finditer(everything):
            learn(found[2], "host")
    return learnt


def _section(section: Section, names: Pseudonyms, learnt: Mapping[str, str]) -> Section:
    stdout = section.stdout
    if section.name == "uname":
        stdout = re.sub(r"^(\S+ )(\S+)", lambda m: m[1] + names.of("host", m[2], lambda n: f"host-{n}"), stdout)
    if section.name in ("disks", "inodes"):
        stdout = _NETWORK_MOUNT.sub(lambda m: f"{m[1]}{names.of('host', m[2], lambda n: f'host-{n}')}", stdout)
    # Hashes of wheels, revisions and settings tell nothing of the owner, and the audit compares them.
    hashes = section.name == "laoka"
    return dataclasses.replace(
        section,
        stdout=_text(stdout, names, learnt, hashes=hashes),
        stderr=_text(section.stderr, names, learnt),
    )


def _text(text: str, names: Pseudonyms, learnt: Mapping[str, str], *, hashes: bool = False) -> str:
    """One text, from the most telling patterns to the least. Arguments: `hashes` leaves long hexadecimal numbers alone."""

    def secret(original: str) -> str:
        return names.of("secret", original, lambda number: f"secret-{number}")

    def user(original: str) -> str:
        kept = original.lower() == "root" or original in names.given.get("user", {}).values()
        return original if kept else names.of("user", original, lambda number: f"user-{number}")

    def host(original: str) -> str:
        kept = original == "localhost" or original.endswith(_PUBLIC_HOSTS) or re.fullmatch(r"host-\d+(\.invalid)?", original)
        return original if kept else names.of("host", original, lambda number: f"host-{number}")

    def serial(match: re.Match[str]) -> str:
        value = match[2].strip()
        return match[0] if _NO_SERIAL.fullmatch(value) else match[1] + names.of("serial", value, lambda n: f"SERIAL{n:06d}")

    def address(match: re.Match[str]) -> str:
        octets = [int(part) for part in match[0].split(".")]
        if max(octets) > 255 or match[0] == "0.0.0.0" or octets[0] in (127, 255):  # noqa: S104 - a pattern, not a socket
            return match[0]
        return names.of("ip", match[0], lambda number: f"192.0.{2 + number // 256}.{number % 256}")

    def login(match: re.Match[str]) -> str:
        if _UNIT_SUFFIX.search(match[0]):
            return match[0]
        return f"{user(match[1])}@{host(match[2])}"

    text = _PRIVATE_KEY.sub(lambda m: secret(m[0]), text)
    text = _PUBLIC_KEY.sub(lambda m: f"{m[1]} {secret(m[0])}", text)
    text = _URL_SECRET.sub(lambda m: f"{m[1]}{user(m[2])}:{secret(m[3])}@" if m[3] else f"{m[1]}{user(m[2])}@", text)
    text = _NAMED_SECRET.sub(lambda m: m[1] + (m[2] if m[2].startswith("secret-") else secret(m[2])), text)
    text = _SHAPED_SECRET.sub(lambda m: secret(m[0]), text)
    text = _SERIAL.sub(serial, text)
    text = _UUID.sub(lambda m: names.of("uuid", m[0], lambda n: f"00000000-0000-4000-8000-{n:012x}"), text)
    text = _SHORT_UUID.sub(lambda m: m[1] + names.of("uuid", m[2], lambda n: f"0000-{n:04X}"), text)
    text = _MAC.sub(lambda m: names.of("mac", m[0], lambda n: f"02:00:00:00:{n // 256:02x}:{n % 256:02x}"), text)
    text = _IPV6.sub(lambda m: m[0] if m[0].count(":") < 2 else names.of("ip6", m[0], lambda n: f"2001:db8::{n:x}"), text)
    if not hashes:
        text = _LONG_HEX.sub(lambda m: names.of("hex", m[0], lambda n: f"{n:032x}"), text)
    text = _IPV4.sub(address, text)
    text = _URL_HOST.sub(lambda m: m[1] + host(m[2]), text)
    text = _LOGIN.sub(login, text)
    text = _LOG_HOST.sub(lambda m: m[1] + host(m[2]), text)
    text = _HOME.sub(lambda m: m[0][: m.start(1) - m.start()] + user(m[1]), text)
    text = _SESSION_USER.sub(lambda m: m[0][: m.start(1) - m.start()] + user(m[1]), text)
    for word, pseudonym in sorted(learnt.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w]){re.escape(word)}(?![\w])", pseudonym, text, flags=re.IGNORECASE)
    return text
