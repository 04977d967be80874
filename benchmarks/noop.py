"""A deploy that changes nothing, on 10 hosts beside an Ansible playbook of as many tasks: `python -m benchmarks.noop` as root.

The deploys are those parts of deploys/full.py that need no engine: ten engines, each with its model in memory, are more than one
machine holds beside the tools that are measured. The hosts are sandbox hosts of this machine with simulated cards. The playbook has
one task for each operation that pyinfra counted: files, units, packages in turn, all as they are already, and no facts gathered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path

from benchmarks.audit import INVENTORY, ansible_env, ansible_tool, measured, sandbox_env
from laoka.sandbox import hosts
from laoka.sandbox.lab import Lab, open_lab

HOSTS, RATIO = 10, 10.0
DEPLOYS = ("deploys/driver.py", "deploys/watchdog.py", "deploys/monitoring.py")
KINDS = (
    'ansible.builtin.copy: {content: "as it is", dest: /root/as-it-is, mode: "0644"}',
    'ansible.builtin.file: {path: /root/as-it-is, state: file, mode: "0644"}',
    "ansible.builtin.systemd: {name: ssh, state: started, enabled: true}",
    "ansible.builtin.apt: {name: openssh-server, state: present}",
)


def deploy(env: Mapping[str, str]) -> dict[str, list[str]]:
    """Run the deploys; which hosts each operation changed. Errors: RuntimeError with the run's last words."""
    argv = [str(Path(sys.executable).with_name("pyinfra")), "--json", "-y", INVENTORY, *DEPLOYS]
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=3000)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return {
        f"{number} {item['name']}": item["success"] for number, item in enumerate(json.loads(done.stdout)["results"]["operations"])
    }


def playbook(lab: Lab, count: int) -> Path:
    """The playbook of `count` tasks, beside the lab."""
    path = lab.folder / "noop.yml"
    tasks = "".join(f"    - {task}\n" for task in islice(cycle(KINDS), count))
    path.write_text(f"- hosts: all\n  gather_facts: false\n  tasks:\n{tasks}")
    return path


def main() -> int:
    """Measure once and print it with the ratio. Exit status 1 when the goal is missed."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else HOSTS
    lab = open_lab("noopbn")
    hosts.down(lab)
    try:
        env = sandbox_env(lab)
        os.environ.update(env)
        up = hosts.up(lab, count, lambda line: print(f"# {line}", file=sys.stderr))
        for host in up:
            hosts.execute(host, "true", check=True)
        print("# the first deploy: ten hosts share this machine's cores", file=sys.stderr)
        deploy(env)
        print("# the second one, whose operations are counted", file=sys.stderr)
        operations = deploy(env)
        changed = [name for name, having in operations.items() if having]
        if changed:
            raise RuntimeError(f"the second run changed something: {changed}")
        ours = measured([str(Path(sys.executable).with_name("pyinfra")), "-y", INVENTORY, *DEPLOYS], env)
        tool, book = ansible_tool(lab.cache), playbook(lab, len(operations))
        rival_env = {**env, **ansible_env(lab.folder, INVENTORY)}
        measured([tool, str(book)], rival_env)  # it writes the file
        rival = measured([tool, str(book)], rival_env)
    finally:
        hosts.down(lab)
    print(f"{os.cpu_count()} cores, {count} hosts, {len(operations)} operations, load {os.getloadavg()[0]:.1f}")
    print(f"{'what':<40}{'wall s':<9}{'CPU s':<8}{'MB':<7}ratio")
    print(
        f"{'pyinfra ' + ' '.join(Path(name).stem for name in DEPLOYS):<40}{ours.wall_s:<9.1f}{ours.cpu_s:<8.1f}{ours.rss_mb:<7.0f}"
    )
    ratio = rival.wall_s / ours.wall_s
    print(f"{'Ansible, as many tasks':<40}{rival.wall_s:<9.1f}{rival.cpu_s:<8.1f}{rival.rss_mb:<7.0f}{ratio:.1f} times")
    print(f"goal: {RATIO:g} times")
    return 0 if ratio >= RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
