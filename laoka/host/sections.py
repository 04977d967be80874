"""The probe's text: sections with an exit status each, every content line marked, so that none can pass for a mark.

@laoka-probe 1                       once; whatever a login shell printed before it is ignored
@section NAME                        a section begins
|a line of standard output
!a line of standard error
@end NAME rc=0 ms=12                 its exit status (124: its deadline passed) and how long it took
@skip NAME reason                    a section that was not tried, and why
@done ms=840                         the last line; without it the text was cut off
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from laoka.host.unread import Maybe, Unread

FORMAT_VERSION = 1
# `timeout` ends with 124; with 137 when the program had to be killed; busybox's with 143.
TIMED_OUT_STATUSES = (124, 137, 143)

_HEAD = re.compile(r"@laoka-probe (\d+)$")
_END = re.compile(r"@end (\S+) rc=(\d+)(?: ms=(\d+))?$")
_DONE = re.compile(r"@done(?: ms=(\d+))?$")


class NotAProbe(ValueError):
    """The text is not the output of the probe; the message is one line."""


@dataclass(frozen=True)
class Section:
    """What one command of the probe gave. When its deadline passed, `stdout` is what came until then."""

    name: str
    status: int
    stdout: str
    stderr: str = ""
    duration_ms: int | None = None
    cut_off: bool = False

    @property
    def timed_out(self) -> bool:
        return self.status in TIMED_OUT_STATUSES


@dataclass(frozen=True)
class Sections:
    """All sections of one probe by name; `skipped` maps a name to the reason; `complete` says that the end was seen."""

    by_name: Mapping[str, Section]
    skipped: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    duration_ms: int | None = None

    def section(self, name: str) -> Maybe[Section]:
        """The section, whatever its status was; Unread when it is not there."""
        found = self.by_name.get(name)
        if found is not None:
            return found
        if name in self.skipped:
            return Unread(self.skipped[name])
        return Unread("not in the input" if self.complete else "the input was cut off before it")

    def output(self, name: str) -> Maybe[str]:
        """The standard output of a section that ended well; Unread with the command's own last words otherwise."""
        section = self.section(name)
        if isinstance(section, Unread):
            return section
        if section.cut_off:
            return Unread("the input was cut off in it")
        if section.timed_out:
            return Unread("no answer before its deadline")
        if section.status != 0:
            words = [line.strip() for line in (section.stderr or section.stdout).splitlines() if line.strip()]
            return Unread(words[-1][:200] if words else f"exit status {section.status}, no output")
        return section.stdout


def parse(text: str) -> Sections:
    """Take the probe's text apart. Errors: NotAProbe when its first mark is missing or of a version unknown here."""
    by_name: dict[str, Section] = {}
    skipped: dict[str, str] = {}
    complete, duration_ms, begun = False, None, False
    name: str | None = None
    out: list[str] = []
    err: list[str] = []
    for line in text.split("\n"):
        line = line.rstrip("\r")
        if not begun:
            if head := _HEAD.match(line):
                if int(head[1]) != FORMAT_VERSION:
                    raise NotAProbe(f"probe format {head[1]} is not known here (known: {FORMAT_VERSION})")
                begun = True
        elif line.startswith("|"):
            out.append(line[1:])
        elif line.startswith("!"):
            err.append(line[1:])
        elif line.startswith("@section "):
            name, out, err = line[len("@section ") :].strip(), [], []
        elif name is not None and (end := _END.match(line)) and end[1] == name:
            by_name[name] = Section(name, int(end[2]), _text(out), _text(err), int(end[3]) if end[3] else None)
            name = None
        elif line.startswith("@skip "):
            skipped_name, _, reason = line[len("@skip ") :].partition(" ")
            skipped[skipped_name] = reason.strip() or "skipped"
        elif done := _DONE.match(line):
            complete, duration_ms = True, int(done[1]) if done[1] else None
    if not begun:
        raise NotAProbe(
            "not the output of laoka's probe (no line @laoka-probe). A log: laoka diagnose FILE; one command's output: "
            "laoka check --file KIND=FILE"
        )
    if name is not None:
        by_name[name] = Section(name, 0, _text(out), _text(err), cut_off=True)
    return Sections(by_name, skipped, complete, duration_ms)


def from_files(texts: Mapping[str, str]) -> Sections:
    """Sections from single files of machine output, by section name; what is not given is unread."""
    return Sections({name: Section(name, 0, text) for name, text in texts.items()})


def render(sections: Sections) -> str:
    """The probe's text again, for a capture; `parse(render(s))` has the same sections."""
    lines = [f"@laoka-probe {FORMAT_VERSION}"]
    for name, section in sections.by_name.items():
        lines.append(f"@section {name}")
        lines += [f"|{line}" for line in section.stdout.split("\n")[: None if section.stdout else 0]]
        lines += [f"!{line}" for line in section.stderr.split("\n")[: None if section.stderr else 0]]
        if not section.cut_off:
            took = "" if section.duration_ms is None else f" ms={section.duration_ms}"
            lines.append(f"@end {name} rc={section.status}{took}")
    lines += [f"@skip {name} {reason}" for name, reason in sections.skipped.items()]
    if sections.complete:
        lines.append("@done" if sections.duration_ms is None else f"@done ms={sections.duration_ms}")
    return "\n".join(lines) + "\n"


def _text(lines: list[str]) -> str:
    return "\n".join(lines)
