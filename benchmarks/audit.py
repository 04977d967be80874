"""What `laoka audit` costs on 1, 10, 50 hosts and 500 captures, beside pyinfra and Ansible: `python -m benchmarks.audit` as root.

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
    counts = tuple(int(word) for word in sys.argv[1:]) or COUNTS
    lab = open_lab("audben")
    hosts.down(lab)
    missed = []
    try:
        ansible = [ansible_tool(lab)]
        write_facts_playbook(lab)
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
        print(f"{'hosts':<7}{'what':<34}{'wall s':<9}{'CPU s':<8}{'MB':<7}ratio", flush=True)
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


def round_of(lab: Lab, up: Sequence[HostFolder], ansible: list[str], audits: dict[int, Cost]) -> list[str]:
    """Measure one number of hosts; the names of missed goals."""
    env = {"LAOKA_SANDBOX_LAB": lab.name, "LAOKA_SANDBOX_DIR": str(lab.state), "PYINFRA_PROGRESS": "off", "LANG": "C.UTF-8"}
    tools, count = Path(sys.executable).parent, len(up)
    for host in up:  # its key is known, apt has its caches, and its answer is kept for the row "cores of their own"
        hosts.execute(host, f"apt-cache gencaches -q && sh -s > {SAVED}", stdin=probe.script(), check=True)
    probe_s = probe_cpu_s(up[0])
    plain = measured([str(tools / "pyinfra"), INVENTORY, "exec", "--", "true"], env)
    told = measured([str(tools / "laoka"), "audit", INVENTORY, "--json", "--parallel", str(AT_ONCE)], env, (0, 1))
    own = measured([sys.executable, "-m", "benchmarks.audit", "--own-cores"], env)
    rival = measured([*ansible, str(lab.folder / "facts.yml")], {**env, **ansible_env(lab, up)})
    audits[count] = told
    for what, cost, ratio in (
        ("pyinfra exec -- true", plain, ""),
        ("laoka audit", told, f"{told.wall_s / plain.wall_s:.2f} of pyinfra exec"),
        ("laoka audit, cores of their own", own, f"{own.wall_s / plain.wall_s:.2f} of pyinfra exec"),
        (f"Ansible, setup + {len(COMMANDS) + 2} tasks", rival, f"{rival.wall_s / told.wall_s:.1f} times laoka audit"),
    ):
        print(f"{count:<7}{what:<34}{cost.wall_s:<9.1f}{cost.cpu_s:<8.1f}{cost.rss_mb:<7.0f}{ratio}", flush=True)
    had = told.wall_s * (os.cpu_count() or 1)
    print(
        f"# of the {had:.1f} CPU s that {os.cpu_count()} cores have in {told.wall_s:.1f} s, {count} probes take "
        f"{count * probe_s:.1f} ({probe_s:.2f} each, on the hosts), laoka and its ssh {told.cpu_s:.1f}", flush=True,
    )  # fmt: skip
    if count < max(COUNTS):
        return []
    missed = [f"{EXEC_RATIO:g} times exec at {count}"] if told.wall_s > EXEC_RATIO * plain.wall_s else []
    return missed + ([f"a {ANSIBLE_RATIO:g}th of Ansible at {count}"] if rival.wall_s < ANSIBLE_RATIO * told.wall_s else [])


def ansible_env(lab: Lab, up: Sequence[HostFolder]) -> dict[str, str]:
    """What makes Ansible as quick as it can be on these hosts, and the inventory of them."""
    inventory = lab.folder / "ansible.ini"
    common = f"ansible_user=root ansible_ssh_private_key_file={lab.key} ansible_python_interpreter=/usr/bin/python3"
    inventory.write_text("".join(f"{host.name} ansible_host={host.address} {common}\n" for host in up))
    ssh = f"-o UserKnownHostsFile={lab.known_hosts} -o ControlMaster=auto -o ControlPersist=60s"
    return {
        "ANSIBLE_INVENTORY": str(inventory), "ANSIBLE_PIPELINING": "1", "ANSIBLE_FORKS": str(len(up)), "ANSIBLE_SSH_ARGS": ssh,
        "ANSIBLE_STDOUT_CALLBACK": "minimal", "ANSIBLE_LOCALHOST_WARNING": "0", "LC_ALL": "C.UTF-8",
    }  # fmt: skip


def ansible_tool(lab: Lab) -> str:
    """The command `ansible-playbook` of an environment of its own."""
    folder = lab.cache / "ansible"
    tool = folder / "bin" / "ansible-playbook"
    if not tool.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)], deadline_s=120, check=True)
        run([str(folder / "bin" / "pip"), "install", "-q", ANSIBLE], deadline_s=600, check=True)
    return str(tool)


def write_facts_playbook(lab: Lab) -> None:
    """The playbook that reads what the probe reads, beside the lab."""
    lab.folder.mkdir(parents=True, exist_ok=True)
    tasks = ["ansible.builtin.package_facts:", "ansible.builtin.service_facts:"]
    for command in COMMANDS.values():
        quoted = command.replace("'", "''")
        tasks.append(f"ansible.builtin.command: {{cmd: '{quoted}'}}\n      changed_when: false\n      failed_when: false")
    listed = "".join(f"    - {task}\n" for task in tasks)
    (lab.folder / "facts.yml").write_text(f"- hosts: all\n  gather_facts: true\n  tasks:\n{listed}")


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
    print(f"{CAPTURES:<7}{'laoka audit, captures':<34}{cost.wall_s:<9.1f}{cost.cpu_s:<8.1f}{cost.rss_mb:<7.0f}{ratio}")
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
