"""How long `laoka --help` takes from start to end, against 150 ms and an empty Python: python -m benchmarks.startup"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 21
LIMIT_MS = 150.0


def median_ms(*argv: str) -> float:
    """The median of RUNS runs, in milliseconds, after one that fills the caches."""
    taken = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken[1:])


def main() -> int:
    """Print the table; 1 when the limit is passed."""
    empty = median_ms(sys.executable, "-c", "pass")
    print(f"{'what':28}{'median ms':>10}{'of the limit':>14}{'of an empty Python':>20}")
    worst = 0.0
    for words in (("--help",), ("--version",), ("plan", "--help")):
        took = median_ms(str(Path(sys.executable).with_name("laoka")), *words)
        print(f"{'laoka ' + ' '.join(words):28}{took:10.0f}{took / LIMIT_MS:14.2f}{took / empty:20.1f}")
        worst = max(worst, took if words == ("--help",) else 0.0)
    print(f"limit: {LIMIT_MS:.0f} ms for laoka --help; an empty Python takes {empty:.0f} ms here; {RUNS} runs each")
    return 0 if worst <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
