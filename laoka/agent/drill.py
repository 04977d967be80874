"""A drill: a record that user space wrote into the kernel log walks the whole way to the phone; nothing happens to a card."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from laoka.agent.kernel_log import parse_kmsg_record

# Facility 1 (user) and level 3 (error): what tells such a record from the kernel's own.
PRIORITY = 1 << 3 | 3
TAIL_BYTES = 64 * 1024


def xid79_text(bdf: str) -> str:
    """What the driver prints when the card at `bdf` falls off the bus."""
    return f"NVRM: Xid (PCI:{bdf.rsplit('.', 1)[0]}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


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
