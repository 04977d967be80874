"""How fast `laoka diagnose` reads: a log of 1 GB, on one core, and how much memory that takes: `python -m benchmarks.diagnose`."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from laoka.diagnose.chain import diagnose
from laoka.diagnose.scan import scan

SIZE_BYTES = 1_000_000_000
LIMIT_MB_S, LIMIT_MIB = 150.0, 400.0
PLAIN = (
    b"(APIServer pid=783) INFO 12-01 03:54:15 [loggers.py:257] Engine 000: Avg prompt throughput: 512.3 tokens/s, Avg generation "
    b"throughput: 256.1 tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.3%, Prefix cache hit rate: 0.0%\n"
    b'(APIServer pid=783) INFO:     10.0.0.3:51234 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
)
COLOURED = PLAIN.replace(b"(APIServer pid=783)", b"\x1b[0;36m(APIServer pid=783)\x1b[0;0m")
KERNEL = b"Dec 01 03:54:15 x99 kernel: pcieport 0000:00:03.0: AER: Corrected error message received from 0000:03:00.0\n"
ERRORS = b"(EngineCore pid=2727) ERROR 12-01 03:54:15 [core.py:980] KeyError: 'req-17'\n"
CRASH = b"(EngineCore pid=2727) ERROR 12-01 03:54:15 [core.py:980] torch.OutOfMemoryError: CUDA out of memory.\n"
KINDS = {"plain": PLAIN, "coloured": COLOURED, "kernel": KERNEL, "one error a line": ERRORS}


def write(path: Path, line: bytes) -> None:
    """A log of SIZE_BYTES of these lines, with one crash at three quarters of it."""
    block = line * (4_000_000 // len(line))
    with path.open("wb") as stream:
        crash_at = SIZE_BYTES * 3 // 4
        while stream.tell() < crash_at:
            stream.write(block)
        stream.write(CRASH)
        while stream.tell() < SIZE_BYTES:
            stream.write(block)


def main() -> int:
    """Print a row for each kind of log. Exit status 1 when one is slower, or takes more memory, than its limit."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    fine = True
    print(f"{'log':<20}{'GB':<8}{'CPU s':<8}{'MB/s':<8}{'limit':<8}{'ratio':<8}{'peak MiB':<10}{'limit':<8}")
    for name, line in KINDS.items():
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            path = Path(folder) / "vllm.log"
            write(path, line)
            size = path.stat().st_size
            began = time.process_time()
            with path.open("rb") as stream:
                found = diagnose([scan(stream, name)])
            spent_s = time.process_time() - began
        assert found.root is not None and found.root.id == "oom", "the crash was not found"
        speed = size / 1e6 / spent_s
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        fine &= speed >= LIMIT_MB_S and peak_mib <= LIMIT_MIB
        print(
            f"{name:<20}{size / 1e9:<8.2f}{spent_s:<8.2f}{speed:<8.0f}{LIMIT_MB_S:<8.0f}{speed / LIMIT_MB_S:<8.2f}"
            f"{peak_mib:<10.0f}{LIMIT_MIB:<8.0f}",
            flush=True,
        )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
