"""Faults on purpose: of the simulated card, the engine, the disk and the network of a throw-away host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from laoka.sandbox import card, hosts, network
from laoka.sandbox.lab import HostFolder, SandboxError

FILLER = "/laoka-sandbox-filler"
ABOVE_4G_OFF = "above-4g-off"
# vLLM's processes by the names that they give themselves.
SERVER, ENGINE, WORKER = "vllm", "VLLM::EngineCor*", "VLLM::Worker*"


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
        name: Fault(name, f"simulated: {kind.what}", _card_fault(name), _card_cleared(name)) for name, kind in card.FAULTS.items()
    }
    about = "simulated: the board has Above 4G Decoding off, so the card's BAR1 has no place"
    simulated[ABOVE_4G_OFF] = Fault(ABOVE_4G_OFF, about, _board(False), _board(True))
    about = "simulated: Secure Boot is on, so the kernel takes no module that nobody signed"
    simulated["secure-boot"] = Fault("secure-boot", about, _marker("secure-boot", True), _marker("secure-boot", False))
    about = "the stand-in DKMS packages fail to build their module, as with a kernel that the driver does not know"
    simulated["dkms-fails"] = Fault("dkms-fails", about, _marker("dkms-fails", True), _marker("dkms-fails", False))
    about = "simulated: the loaded module does not let go, as when something unknown has the card open"
    simulated["module-held"] = Fault("module-held", about, _marker("module-held", True), _marker("module-held", False))
    about = "the host does not come back from its next reboot; up boots it again"
    simulated["no-return"] = Fault("no-return", about, _switch("no-return", True), _switch("no-return", False))
    real = {
        "engine-killed": Fault("engine-killed", "the engine's process is killed with SIGKILL", _signal(ENGINE, "KILL"), None),
        "engine-frozen": Fault(
            "engine-frozen",
            "the engine's process stands still (SIGSTOP), while the server's /health says 200",
            _signal(ENGINE, "STOP"),
            _signal(ENGINE, "CONT"),
        ),
        "worker-frozen": Fault(
            "worker-frozen",
            "the engine's worker, which has the card, stands still (SIGSTOP)",
            _signal(WORKER, "STOP"),
            _signal(WORKER, "CONT"),
        ),
        "server-killed": Fault("server-killed", "the API server is killed, its engine is not", _signal(SERVER, "KILL"), None),
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
    return lambda host: card.apply_fault(host.card, name, hosts.cards(host)[0].bdf)


def _card_cleared(name: str) -> Callable[[HostFolder], None]:
    return lambda host: card.clear_fault(host.card, name, hosts.cards(host)[0].bdf)


def active(host: HostFolder) -> tuple[str, ...]:
    """Names of the faults of a host's card and board that are on now."""
    names = tuple(fault.name for fault in card.active_faults(host.card))
    more = [name for name in ("secure-boot", "dkms-fails", "module-held") if (host.card / name).exists()]
    more += [name for name in (ABOVE_4G_OFF, "no-return") if (host.folder / name).exists()]
    return (*names, *more)


def _marker(name: str, on: bool) -> Callable[[HostFolder], None]:
    """A file beside the simulated card, which the host's stand-ins look for."""
    return lambda host: (host.card / name).touch() if on else (host.card / name).unlink(missing_ok=True)


def _switch(name: str, on: bool) -> Callable[[HostFolder], None]:
    """A file beside the host, which its supervisor looks for."""
    return lambda host: (host.folder / name).touch() if on else (host.folder / name).unlink(missing_ok=True)


def _board_marker(host: HostFolder) -> Path:
    return host.folder / ABOVE_4G_OFF


def _board(above_4g: bool) -> Callable[[HostFolder], None]:
    def apply(host: HostFolder) -> None:
        (host.card / "kmsg").write_text("")  # a firmware setting changes over a reboot, and the kernel's log starts anew
        card.create(host.card, (card.v100_pcie_32gb(),), bar_above_4g=above_4g)
        if above_4g:
            _board_marker(host).unlink(missing_ok=True)
        else:
            _board_marker(host).touch()

    return apply


def signal_script(name: str, signal: str) -> str:
    """The shell command that signals the processes of the served unit of one name, and says which.

    Arguments: `name` as the kernel cuts it, to 15 characters; `signal` without its SIG.
    """
    # By the processes of the unit, not by a name over ssh: that would match the shell that looks for it.
    return (
        "for p in $(cat /sys/fs/cgroup/system.slice/qwen-serve.service/cgroup.procs 2>/dev/null); do "
        f"case $(cat /proc/$p/comm) in {name}) kill -{signal} $p && echo signalled $p;; esac; done"
    )


def _signal(name: str, signal: str) -> Callable[[HostFolder], None]:
    def apply(host: HostFolder) -> None:
        done = hosts.execute(host, signal_script(name, signal))
        if "signalled" not in done.stdout:
            raise SandboxError(f"{host.name}: no such process runs: pyinfra inventories/sandbox.py deploys/full.py")

    return apply


def _fill_disk(host: HostFolder) -> None:
    hosts.execute(
        host,
        f"fallocate -l $(df --output=avail -B1 / | tail -n 1) {FILLER}; cat /dev/zero >> {FILLER} 2>/dev/null; df -h / | tail -n 1",
        deadline_s=120,
    )


def _free_disk(host: HostFolder) -> None:
    hosts.execute(host, f"rm -f {FILLER}", check=True)


def _cut(cut_off: bool) -> Callable[[HostFolder], None]:
    return lambda host: network.cut(host.interface, cut_off=cut_off)
