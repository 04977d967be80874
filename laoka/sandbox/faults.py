"""Faults on purpose: of the simulated card, the engine, the disk and the network of a throw-away host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laoka.sandbox import card, hosts, network
from laoka.sandbox.lab import HostFolder, SandboxError

FILLER = "/laoka-sandbox-filler"


@dataclass(frozen=True)
class Fault:
    """One fault: what it does in words, and how it is brought about and taken back (None: nothing to take back)."""

    name: str
    about: str
    apply: Callable[[HostFolder], None]
    clear: Callable[[HostFolder], None] | None


def catalogue() -> dict[str, Fault]:
    """Every fault by name."""
    simulated = {
        name: Fault(name, f"{about} (simulated)", _card_fault(name), _card_cleared(name)) for name, about in card.FAULTS.items()
    }
    real = {
        "engine-killed": Fault("engine-killed", "the engine's process is killed with SIGKILL", _kill_engine, None),
        "disk-full": Fault("disk-full", "the host's disk has no byte left", _fill_disk, _free_disk),
        "network-cut": Fault("network-cut", "the host's network cable is pulled", _cut(True), _cut(False)),
    }
    return simulated | real


def apply(host: HostFolder, name: str, *, clear: bool) -> None:
    """Bring a fault about on a host, or take it back. Errors: SandboxError with the names there are."""
    found = catalogue().get(name)
    if found is None:
        raise SandboxError(f"no fault is called {name!r}; there are: {', '.join(sorted(catalogue()))}")
    if not clear:
        found.apply(host)
    elif found.clear is None:
        raise SandboxError(f"{name} can't be taken back: what it ended comes back by itself or by a deploy")
    else:
        found.clear(host)


def _card_fault(name: str) -> Callable[[HostFolder], None]:
    return lambda host: card.apply_fault(host.card, name, card.cards_of(host.card)[0].bdf)


def _card_cleared(name: str) -> Callable[[HostFolder], None]:
    return lambda host: card.clear_fault(host.card, name, card.cards_of(host.card)[0].bdf)


def _kill_engine(host: HostFolder) -> None:
    # By the processes of the unit, not by a name over ssh: that would match the shell that looks for it.
    done = hosts.execute(
        host,
        "for p in $(cat /sys/fs/cgroup/system.slice/qwen-serve.service/cgroup.procs 2>/dev/null); do "
        "case $(cat /proc/$p/comm) in VLLM::EngineCor*) kill -9 $p && echo killed $p;; esac; done",
    )
    if "killed" not in done.stdout:
        raise SandboxError(f"{host.name}: no engine process runs: pyinfra inventories/sandbox.py deploys/full.py")


def _fill_disk(host: HostFolder) -> None:
    hosts.execute(
        host,
        f"fallocate -l $(df --output=avail -B1 / | tail -n 1) {FILLER}; cat /dev/zero >> {FILLER} 2>/dev/null; df -h / | tail -n 1",
        deadline_s=120,
    )


def _free_disk(host: HostFolder) -> None:
    hosts.execute(host, f"rm -f {FILLER}", check=True)


def _cut(cut_off: bool) -> Callable[[HostFolder], None]:
    return lambda host: network.cut(f"vb-{host.machine}", cut_off=cut_off)
