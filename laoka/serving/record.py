"""The readiness record of a served model: one small JSON file that says what its unit does, since when, and why it does not serve.

`qwen-serve` writes it (laoka.serving.supervise); whoever wants to know reads it: the gate of a deploy, the watchdog, a person.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from laoka.files import write_atomic

UNIT = "qwen-serve.service"

State = Literal["starting", "ready", "stopping", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a unit does. Times are seconds; `since_unix_s` is when `state` began.

    `kind` names what is wrong when it is "failed" (one of laoka.serving.failure.KINDS, or a kind of laoka.serving.completion);
    `detail` is one line for people. `start_s` is how long the last start took until its first completion, None before that.
    `engine` says what its processes did when it was found ill.
    """

    unit: str
    state: State
    since_unix_s: float
    pid: int
    kind: str = ""
    detail: str = ""
    fix: str = ""
    start_s: float | None = None
    engine: str = ""


def path_of(unit: str = UNIT) -> Path:
    """Where a unit's record lies: of qwen-serve, or of the instance qwen-serve@NAME."""
    instance = unit.removesuffix(".service").partition("@")[2]
    return Path("/run/qwen-serve", instance, "state.json")


def write_record(path: str | Path, record: Record) -> None:
    """Write a record, whole or not at all. Errors: OSError."""
    write_atomic(path, json.dumps(asdict(record), ensure_ascii=False) + "\n")


def read_record(path: str | Path) -> Record | None:
    """The record at `path`; None when there is none, or when what is there is not one."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        return Record(**{field.name: raw[field.name] for field in fields(Record) if field.name in raw})
    except (OSError, ValueError, TypeError, KeyError):
        return None
