"""A drill: a record that user space wrote into the kernel log walks the whole way to the phone; nothing happens to a card."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from laoka.agent import nvml
from laoka.agent.config import Config
from laoka.agent.kernel_log import DRILL_MARK, parse_kmsg_record
from laoka.agent.signals import Signal

Fault = Literal["xid79", "hung", "heat", "engine"]
FAULTS: tuple[Fault, ...] = get_args(Fault)

# Facility 1 (user) and level 3 (error): what tells such a record from the kernel's own.
PRIORITY = 1 << 3 | 3
TAIL_BYTES = 64 * 1024


def xid79_text(bdf: str) -> str:
    """What the driver prints when the card at `bdf` falls off the bus."""
    return f"NVRM: Xid (PCI:{bdf.rsplit('.', 1)[0]}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def record_text(fault: Fault, config: Config) -> str:
    """The record that rehearses a fault of the first card. All but xid79 have words of their own, which nothing else prints."""
    bdf = config.gpu[0].bdf
    return xid79_text(bdf) if fault == "xid79" else f"{DRILL_MARK.decode()} {fault} {bdf}"


def signal_of(text: str, config: Config) -> Signal | None:
    """The signal of a record that `record_text` made for a fault that the kernel log does not tell; None: it is none."""
    found = re.fullmatch(rf"{DRILL_MARK.decode()} (hung|heat|engine) ([0-9a-f:.]+)", text.strip())
    gpu = next((gpu for gpu in config.gpu if found and gpu.bdf == found[2]), None)
    if found is None or gpu is None:
        return None
    fault, values = found[1], dict[str, str | int | float]()
    if fault == "heat":
        limit_c = nvml.limits(gpu, {}).get("memory", 85.0)
        values = {"part": "HBM", "temperature_c": int(limit_c), "limit_c": f"{limit_c:g}"}
    elif fault == "hung":
        values = {"deadline_s": f"{config.nvml_deadline_s:g}", "count": 0}
    else:
        values = {"kind": "drill", "detail": "no answer"}
    kind = _KINDS[fault]
    return Signal(
        kind, "kernel_log", gpu.bdf if fault == "heat" else None, seen=text[:400], values=values, lasting=False, drill=True
    )


_KINDS: Mapping[str, str] = {"hung": "nvml_hung", "heat": "heat", "engine": "engine_no_answer"}


def write_record(log: str, text: str) -> None:
    """Write one record as user space may: to /dev/kmsg, or at the end of a file of such records. Errors: OSError."""
    path = Path(log)
    if stat.S_ISCHR(path.stat().st_mode):
        data = f"<{PRIORITY}>{text}\n"
    else:
        with path.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
            records = [record for line in stream.read().split(b"\n") if (record := parse_kmsg_record(line))]
        data = f"{PRIORITY},{records[-1].sequence + 1 if records else 0},{time.monotonic_ns() // 1000},-;{text}\n"
    with path.open("ab", buffering=0) as stream:
        stream.write(data.encode())
