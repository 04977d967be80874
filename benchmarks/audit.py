"""What `laoka audit` costs on 1, 10, 50 hosts and 500 captures, beside pyinfra and Ansible: `python -m benchmarks.audit` as root.

`python -m benchmarks.audit INVENTORY.py` measures on hosts of one's own instead, which work while this machine waits for them.

The hosts are sandbox hosts of this machine: systemd and sshd of their own, simulated cards, nothing deployed, and apt's caches made
once, as apt's own timers do on any host that is older than a day. They share its cores with the program that is measured, so that
the probe's own work counts as if this machine did it: its CPU on one host is printed. The row "cores of their own" is the fleet
whose hosts are machines: each waits as long as its probe took when it ran alone, and prints what that printed. Ansible's tasks read
the same places as the probe.
ansible-core is installed into an environment of its own, beside the sandbox's downloads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.check import probe_cpu_s
from laoka.fleet.audit import AuditTarget, audit
from laoka.fleet.expected import expected_of
from laoka.fleet.inventory import load_inventory
from laoka.fleet.targets import ssh_target
from laoka.host import collect, probe
from laoka.host.collect import CouldNotCollect, SshTarget, ssh_argv
from laoka.host.report import HostReport
from laoka.process import run
from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder, Lab, open_lab

COUNTS, CAPTURES = (1, 10, 50), 500
EXEC_RATIO, ANSIBLE_RATIO, HOST_MB, CAPTURES_LIMIT_S = 1.5, 20.0, 1.0, 10.0
AT_ONCE = 16
"""The hosts share this machine's cores: with more at once, probes would run into their own deadline."""
INVENTORY = "inventories/sandbox.py"
SAVED = "/root/probe.txt"
PRINT_SAVED = f"ms=$(sed -n 's/^@done ms=//p' {SAVED}); sleep $((ms / 1000)).$(printf %03d $((ms % 1000))); cat {SAVED}"
ANSIBLE = "ansible-core==2.19.*"

# What the probe reads, as an operator would ask for it with Ansible.
COMMANDS = {
    "PCI": "sh -c 'grep -Hs \"\" /sys/bus/pci/devices/*/vendor /sys/bus/pci/devices/*/device /sys/bus/pci/devices/*/resource'",
    "kernel log": "sh -c 'dmesg; journalctl -k -n 8000 --no-pager -q'",
    "lspci": "lspci -Dnnvvv -d 10de:",
    "firmware": "dmidecode -t 4,9,16,17,39",
    "nvidia-smi": "nvidia-smi -q -x",
    "modules": "sh -c 'cat /proc/modules /proc/driver/nvidia/version'",
    "modules on disk": "sh -c 'for d in /lib/modules/*/; do modinfo -k $(basename $d) nvidia; done'",
    "GRUB": "sh -c 'cat /etc/default/grub /boot/grub/grubenv; grep menuentry /boot/grub/grub.cfg'",
    "holds": "apt-mark showhold",
    "preferences": "sh -c 'cat /etc/apt/preferences /etc/apt/preferences.d/*; apt-config dump'",
    "candidates": "apt-cache policy nvidia-driver-580-server nvidia-headless-580-server cuda linux-image-generic linux-image-amd64",
    "disks": "df -kP",
    "laoka": "sh -c 'cat /run/laoka/watchdog.json /var/lib/laoka/stamps/*; readlink /opt/laoka/engines/current'",
}


RIVAL = f"Ansible, setup + {len(COMMANDS) + 2} tasks"
PLAIN_ENV = {"PYINFRA_PROGRESS": "off", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Cost:
    """What a command took: wall seconds, CPU seconds of it and its children on this machine's side, its largest process in MB."""

    wall_s: float
    cpu_s: float
    rss_mb: float


def measured(argv: Sequence[str], env: Mapping[str, str], allowed: tuple[int, ...] = (0,)) -> Cost:
    """Run a command to its end. Errors: RuntimeError with its last words for a status that is not `allowed`."""
    with tempfile.TemporaryFile() as out:
        started = time.monotonic()
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **env})
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.monotonic() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in allowed:
            out.seek(0)
            raise RuntimeError(f"{' '.join(argv[:4])}: status {child.returncode}: {out.read()[-2000:].decode(errors='replace')}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> int:
    """Measure everything once and print it with its ratios. Exit status 1 when a goal is missed."""
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        return own_hosts(sys.argv[1])
    counts = tuple(int(word) for word in sys.argv[1:]) or COUNTS
    lab = open_lab("audben")
    os.environ.update(sandbox_env(lab))
    hosts.down(lab)
    missed = []
    try:
        ansible = ansible_tool(lab.cache)
        head()
        audits: dict[int, Cost] = {}
        for count in counts:
            up = hosts.up(lab, count, lambda line: print(f"# {line}", file=sys.stderr))
            missed += round_of(lab, up, ansible, audits)
        grown = [(audits[count].rss_mb - audits[counts[0]].rss_mb) / max(1, count - counts[0]) for count in counts]
        print(f"memory of the audit grows by {grown[-1]:.2f} MB a host (limit {HOST_MB:g})")
        missed += ["memory"] if grown[-1] > HOST_MB else []
        missed += captures_of(up[0])
    finally:
        hosts.down(lab)
    print(f"missed: {', '.join(missed) or 'none'}; load {os.getloadavg()[0]:.1f} after")
    return 1 if missed else 0


def head() -> None:
    """The table's head, and what else this machine was busy with."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
    print(f"{'hosts':<7}{'what':<34}{'wall s':<9}{'CPU s':<8}{'MB':<7}ratio", flush=True)


def row(count: int, what: str, cost: Cost, ratio: str = "") -> None:
    """One line of the table."""
    print(f"{count:<7}{what:<34}{cost.wall_s:<9.1f}{cost.cpu_s:<8.1f}{cost.rss_mb:<7.0f}{ratio}", flush=True)


def own_hosts(inventory: str) -> int:
    """Measure once on the hosts of an inventory, each asked for the first time before. Exit status 1 when a goal is missed."""
    env, count = PLAIN_ENV, len(load_inventory(inventory))
    with tempfile.TemporaryDirectory() as folder:
        ansible = shutil.which("ansible-playbook") or ansible_tool(Path(folder))
        head()
        exec_and_audit(inventory, env, ())
        plain, told = exec_and_audit(inventory, env, ())
        row(count, "pyinfra exec -- true", plain)
        row(count, "laoka audit", told, of_exec(told, plain))
        rival = ansible_facts(ansible, Path(folder), inventory, env)
    row(count, RIVAL, rival, of_audit(rival, told))
    missed = goals(plain, told, rival, count)
    print(f"missed: {', '.join(missed) or 'none'}; load {os.getloadavg()[0]:.1f} after")
    return 1 if missed else 0


def round_of(lab: Lab, up: Sequence[HostFolder], ansible: str, audits: dict[int, Cost]) -> list[str]:
    """Measure one number of sandbox hosts; the names of missed goals."""
    env, count = sandbox_env(lab), len(up)
    for host in up:  # its key is known, apt has its caches, and its answer is kept for the row "cores of their own"
        hosts.execute(host, f"apt-cache gencaches -q && sh -s > {SAVED}", stdin=probe.script(), check=True)
    probe_s = probe_cpu_s(up[0])
    plain, told = exec_and_audit(INVENTORY, env, ("--parallel", str(AT_ONCE)))
    own = measured([sys.executable, "-m", "benchmarks.audit", "--own-cores"], env)
    rival = ansible_facts(ansible, lab.folder, INVENTORY, env)
    audits[count] = told
    row(count, "pyinfra exec -- true", plain)
    row(count, "laoka audit", told, of_exec(told, plain))
    row(count, "laoka audit, cores of their own", own, of_exec(own, plain))
    row(count, RIVAL, rival, of_audit(rival, told))
    had = told.wall_s * (os.cpu_count() or 1)
    print(
        f"# of the {had:.1f} CPU s that {os.cpu_count()} cores have in {told.wall_s:.1f} s, {count} probes take "
        f"{count * probe_s:.1f} ({probe_s:.2f} each, on the hosts), laoka and its ssh {told.cpu_s:.1f}", flush=True,
    )  # fmt: skip
    return goals(plain, told, rival, count) if count >= max(COUNTS) else []


def exec_and_audit(inventory: str, env: Mapping[str, str], options: Sequence[str]) -> tuple[Cost, Cost]:
    """What `pyinfra INVENTORY exec -- true` costs, and an audit of the same hosts."""
    tools = Path(sys.executable).parent
    plain = measured([str(tools / "pyinfra"), inventory, "exec", "--", "true"], env)
    return plain, measured([str(tools / "laoka"), "audit", inventory, "--json", *options], env, (0, 1))


def of_exec(told: Cost, plain: Cost) -> str:
    """The ratio to pyinfra's exec, in words."""
    return f"{told.wall_s / plain.wall_s:.2f} of pyinfra exec"


def of_audit(rival: Cost, told: Cost) -> str:
    """The rival's ratio to the audit, in words."""
    return f"{rival.wall_s / told.wall_s:.1f} times laoka audit"


def goals(plain: Cost, told: Cost, rival: Cost, count: int) -> list[str]:
    """The names of the goals that were missed."""
    missed = [f"{EXEC_RATIO:g} times exec at {count}"] if told.wall_s > EXEC_RATIO * plain.wall_s else []
    return missed + ([f"a {ANSIBLE_RATIO:g}th of Ansible at {count}"] if rival.wall_s < ANSIBLE_RATIO * told.wall_s else [])


def sandbox_env(lab: Lab) -> dict[str, str]:
    """The environment in which inventories/sandbox.py names a lab's hosts."""
    return {**PLAIN_ENV, "LAOKA_SANDBOX_LAB": lab.name, "LAOKA_SANDBOX_DIR": str(lab.state)}


def ansible_facts(tool: str, folder: Path, inventory: str, env: Mapping[str, str]) -> Cost:
    """What the same facts cost with Ansible."""
    return measured([tool, str(facts_playbook(folder))], {**env, **ansible_env(folder, inventory)})


def ansible_env(folder: Path, inventory: str) -> dict[str, str]:
    """What makes Ansible as quick as it can be on an inventory's hosts, which are written for it into the folder."""
    path, lines = folder / "ansible.ini", []
    for entry in load_inventory(inventory):
        target = ssh_target(entry.name, entry.data)
        assert target is not None, "Ansible reaches hosts over ssh"
        known = f'ansible_ssh_common_args="-o UserKnownHostsFile={target.known_hosts_file}"' if target.known_hosts_file else ""
        lines.append(
            f"{entry.name} ansible_host={target.host} ansible_port={target.port} ansible_user={target.user or 'root'} "
            f"ansible_ssh_private_key_file={target.key_file} ansible_python_interpreter=/usr/bin/python3 {known}\n"
        )
    path.write_text("".join(lines))
    return {
        "ANSIBLE_INVENTORY": str(path), "ANSIBLE_PIPELINING": "1", "ANSIBLE_FORKS": str(len(lines)),
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=60s",
        "ANSIBLE_STDOUT_CALLBACK": "minimal", "ANSIBLE_LOCALHOST_WARNING": "0", "LC_ALL": "C.UTF-8",
    }  # fmt: skip


def ansible_tool(cache: Path) -> str:
    """The command `ansible-playbook` of an environment of its own."""
    folder = cache / "ansible"
    tool = folder / "bin" / "ansible-playbook"
    if not tool.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)], deadline_s=120, check=True)
        run([str(folder / "bin" / "pip"), "install", "-q", ANSIBLE], deadline_s=600, check=True)
    return str(tool)


def facts_playbook(folder: Path) -> Path:
    """The playbook that reads what the probe reads, written into the folder."""
    path = folder / "facts.yml"
    tasks = ["ansible.builtin.package_facts:", "ansible.builtin.service_facts:"]
    for command in COMMANDS.values():
        quoted = command.replace("'", "''")
        tasks.append(f"ansible.builtin.command: {{cmd: '{quoted}'}}\n      changed_when: false\n      failed_when: false")
    listed = "".join(f"    - {task}\n" for task in tasks)
    path.write_text(f"- hosts: all\n  gather_facts: true\n  tasks:\n{listed}")
    return path


def captures_of(host: HostFolder) -> list[str]:
    """Measure 500 captures of one host as one fleet; the names of missed goals."""
    text = collect.text_over_ssh(hosts.ssh_target(host))
    with tempfile.TemporaryDirectory() as folder:
        names = [f"h{number}" for number in range(CAPTURES)]
        for name in names:
            (Path(folder) / f"{name}.probe.txt").write_text(text)
        inventory = Path(folder) / "fleet.py"
        inventory.write_text(f"fleet = [f'h{{number}}' for number in range({CAPTURES})]\n")
        argv = [str(Path(sys.executable).parent / "laoka"), "audit", str(inventory), "--captures", folder, "--json"]
        cost = measured(argv, {"LANG": "C.UTF-8"}, (0, 1))
    ratio = f"{cost.wall_s / CAPTURES_LIMIT_S:.2f} of the limit of {CAPTURES_LIMIT_S:g} s"
    row(CAPTURES, "laoka audit, captures", cost, ratio)
    return ["captures"] if cost.wall_s > CAPTURES_LIMIT_S else []


def own_cores() -> int:
    """The audit of the inventory's hosts where each only waits and prints as its probe did before."""

    def read(target: SshTarget) -> HostReport:
        done = run([*ssh_argv(target)[:-1], PRINT_SAVED], deadline_s=60)
        if not done.ok:
            raise CouldNotCollect(f"{target.name}: {done.last_line()}")
        return HostReport.from_probe(done.stdout)

    targets = []
    for entry in load_inventory(INVENTORY):
        target = ssh_target(entry.name, entry.data)
        assert target is not None
        targets.append(AuditTarget(entry.name, partial(read, target), expected_of(entry.name, entry.data, None, has_lock=False)))
    result = audit(targets)
    return 1 if result.could_not_read else 0


if __name__ == "__main__":
    sys.exit(own_cores() if sys.argv[1:] == ["--own-cores"] else main())
