"""One line of a log without what stands before its own words: colours, Docker, journald, vLLM's process and level. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

ANSI = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ANSI_TEXT = re.compile(ANSI.pattern.decode())

# What others put before a line, in the order in which it is taken off.
_BEFORE = tuple(
    re.compile(pattern)
    for pattern in (
        r"[\w.-]+ +\| ",  # docker compose: `vllm-1  | `
        r"\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)? (?:stdout|stderr) [FP] ",  # CRI, Kubernetes
        r"\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? \S+ [\w@./:-]+(?:\[\d+\])?: ",  # journalctl -o short-iso
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? \S+ [\w@./:-]+(?:\[\d+\])?: ",  # syslog, journalctl
        r"\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)? ",  # docker logs --timestamps
    )
)
_PROCESS = re.compile(r"\(([A-Za-z][\w ]*) pid=(\d+)\)\s?")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d [\d:.,]+ \[[^\]]*\] ?|: +| +\[?(?=\S))")
_RAISED = re.compile(r"(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]\w*(?:Error|Exception|Interrupt)\b(?::|$)")
_SAID = re.compile(
    r"(?:[\w./ -]{1,40}: )?(?:fatal )?error: |Fatal Python error|Segmentation fault|NVRM: (?:Xid|GPU.*fallen)|kernel panic"
    r"|Exception in thread|terminate called after|Out of memory: Killed process|.*: segfault at ",
    re.IGNORECASE,
)
_NO_WORDS = re.compile(r"Traceback \(most recent call last\)|File \"|During handling of|The above exception|[\^~ ]*$")


@dataclass(frozen=True)
class Line:
    """A line's own words. `process` is "EngineCore 2727" where vLLM says so; `level` is empty where the line has none."""

    text: str
    process: str = ""
    level: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the line itself tells of an error; frames of a traceback and its head do not."""
        words = self.text.strip()
        if not words or _NO_WORDS.match(words):
            return False
        if self.level:
            return self.level in ("ERROR", "CRITICAL") and not self.text.startswith("  ")
        return bool(_RAISED.match(self.text) or _SAID.match(self.text))


def clean(raw: str) -> Line:
    """A physical line as its writer meant it; a record of JSON (Docker, journald, a JSON logger) by its message."""
    text = raw.rstrip("\r\n")
    level = ""
    for _ in range(4):
        if text.startswith("{") and (found := _record(text)) is not None:
            text, level = found[0].rstrip("\n"), found[1] or level
        text = _ANSI_TEXT.sub("", text)
        before = next((match for pattern in _BEFORE if (match := pattern.match(text))), None)
        if before is None:
            break
        text = text[before.end() :]
    process = ""
    if match := _PROCESS.match(text):
        process, text = f"{match[1]} {match[2]}", text[match.end() :]
    if match := _LEVEL.match(text):
        level, text = match[1], text[match.end() :]
    return Line(text, process, level)


def _record(text: str) -> tuple[str, str] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    for key in ("log", "MESSAGE", "message", "msg"):
        if isinstance(content.get(key), str):
            level = content.get("levelname") or content.get("level") or ""
            return content[key], level.upper() if isinstance(level, str) else ""
    return None
