"""NVIDIA's device nodes, made before a unit that may not make them: `python -m laoka.serving.devices` as root.

CUDA makes missing nodes by a set-uid helper (nvidia-modprobe), which a unit with NoNewPrivileges can't use. Whether anything else
made /dev/nvidia-uvm since the boot depends on the distribution; without it the first CUDA call fails. The numbers are the kernel's.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

GPU_MINORS = range(255)
CONTROL_MINOR = 255  # NVIDIA's driver README, "How and when are the NVIDIA device files created?"


@dataclass(frozen=True)
class Node:
    """A character device."""

    path: str
    major: int
    minor: int


def wanted_nodes(proc_devices: str, gpu_minors: tuple[int, ...]) -> tuple[Node, ...]:
    """The nodes that CUDA needs, by /proc/devices and each card's "Device Minor"; none for a module that is not loaded."""
    majors: dict[str, int] = {}
    for line in proc_devices.split("Block devices:")[0].splitlines():
        words = line.split()
        if len(words) == 2 and words[0].isdecimal():
            majors.setdefault(words[1], int(words[0]))
    found = []
    # "nvidia-frontend" is what drivers up to branch 535 call it, "nvidia" and "nvidiactl" later ones; all have the same major.
    main = next((majors[name] for name in ("nvidia", "nvidia-frontend", "nvidiactl") if name in majors), None)
    if main is not None:
        found += [Node(f"/dev/nvidia{minor}", main, minor) for minor in gpu_minors]
        found.append(Node("/dev/nvidiactl", majors.get("nvidiactl", main), CONTROL_MINOR))
    if "nvidia-uvm" in majors:
        found += [Node("/dev/nvidia-uvm", majors["nvidia-uvm"], 0), Node("/dev/nvidia-uvm-tools", majors["nvidia-uvm"], 1)]
    return tuple(found)


def parse_minor(information: str) -> int | None:
    """The minor number of one card, from /proc/driver/nvidia/gpus/*/information."""
    match = re.search(r"^Device Minor:\s*(\d+)", information, re.MULTILINE)
    return int(match[1]) if match and int(match[1]) in GPU_MINORS else None


def main(root: Path = Path("/")) -> int:
    """Make what is missing; 0 also where there is no NVIDIA driver, 1 when a node could not be made."""
    minors = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        minor = parse_minor(path.read_text(errors="replace"))
        if minor is not None:
            minors.append(minor)
    status = 0
    for node in wanted_nodes((root / "proc/devices").read_text(), tuple(minors)):
        path = root / node.path.lstrip("/")
        if path.exists():
            continue
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(node.major, node.minor))
            path.chmod(0o666)
        except OSError as error:
            print(f"{node.path}: {error.strerror}: CUDA will not find the card", file=sys.stderr)
            status = 1
        else:
            print(f"{node.path} was missing: made", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
