"""Opens the gateway's port in whatever filters this host, and keeps the engines' ports to the host itself; never touches SSH.

    python -m laoka.serving.firewall apply|check|remove --settings /etc/laoka/firewall.json

What is there stays. ufw is asked to allow the port; a chain of nftables or iptables that drops what it does not know gets a rule
at its head; what closes a port is in a table of our own, which accepts everything else. An accept there opens nothing: nftables
asks every table, and one that drops has the last word (man nft, "accept").
Exit status: 0 as wanted, 1 not (a line for each reason), 2 the settings or the firewall can't be read.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from laoka.process import ProcessError, run

TABLE = "laoka"
MARK = "laoka"
"""First word of the comment by which a rule is known as ours."""
DEADLINE_S = 30.0
SSH_PORT = 22


@dataclass(frozen=True)
class Wanted:
    """What has to be. `port` is the gateway's (None: on loopback only); `sources` the networks that may use it (none: all);
    `inner_ports` are the engines', which nobody but the host itself may reach."""

    port: int | None = None
    sources: tuple[str, ...] = ()
    inner_ports: tuple[int, ...] = ()

    def marks(self, family: str = "inet") -> dict[str, str]:
        """The rules that open the port, by comment: each one's source ("" for everybody). `family` is nftables' name."""
        if self.port is None:
            return {}
        if not self.sources:
            return {f"{MARK} {self.port}": ""}
        version = {"ip": 4, "ip6": 6}.get(family)
        wanted = [source for source in self.sources if version in (None, ipaddress.ip_network(source).version)]
        return {f"{MARK} {self.port} from {source}": source for source in wanted}


@dataclass(frozen=True)
class Chain:
    """A base chain of nftables at the input hook that drops what it does not know; `marks`: our rules in it, handle by comment."""

    family: str
    table: str
    name: str
    marks: Mapping[str, int]


@dataclass(frozen=True)
class State:
    """What filters this host now. `own_table` is our table's comment ("": there is none); `ufw` our rules by comment, None without
    ufw; `iptables` our rules by comment for each program whose INPUT drops what it does not know."""

    chains: tuple[Chain, ...]
    own_table: str
    ufw: Mapping[str, str] | None
    iptables: Mapping[str, Mapping[str, str]]
    firewalld: bool = False
    firewalld_open: bool = False


# ---- what is there: pure ------------------------------------------------------------------------------------------------


def wanted_of(text: str) -> Wanted:
    """Read the settings file. Errors: ValueError, KeyError or TypeError for one that is none."""
    found = json.loads(text)
    sources = tuple(str(ipaddress.ip_network(source)) for source in found["sources"])
    port = None if found["port"] is None else int(found["port"])
    return Wanted(port, sources, tuple(int(number) for number in found["inner_ports"]))


def _verdicts(rule: Mapping[str, Any]) -> set[str]:
    return {key for item in rule.get("expr", ()) for key in item}


def _closes(rule: Mapping[str, Any]) -> bool:
    """Whether a rule drops or rejects whatever comes to it."""
    verdicts = _verdicts(rule)
    return bool(verdicts & {"drop", "reject"}) and verdicts <= {"drop", "reject", "counter", "log"}


def read_ruleset(text: str, *, managed: Iterable[str] = ()) -> tuple[tuple[Chain, ...], str]:
    """The chains of `nft -j list ruleset` that close this host, and our own table's comment ("" where it is not there).

    Arguments: `managed` are families whose table `filter` belongs to iptables, which does not understand nftables' own rules.
    Errors: ValueError.
    """
    items = json.loads(text).get("nftables", [])
    rules = [item["rule"] for item in items if "rule" in item]
    own = next((item["table"] for item in items if "table" in item and _is_own(item["table"], item["table"].get("name"))), None)
    found = []
    for chain in (item["chain"] for item in items if "chain" in item):
        place = (chain["family"], chain["table"], chain["name"])
        if chain.get("hook") != "input" or chain.get("type") != "filter" or chain["family"] not in ("ip", "ip6", "inet"):
            continue
        if _is_own(chain, chain["table"]) or chain["table"] == "firewalld":
            continue
        if chain["family"] in managed and place[1:] == ("filter", "INPUT"):
            continue
        inside = [rule for rule in rules if (rule["family"], rule["table"], rule["chain"]) == place]
        if chain.get("policy") == "drop" or any(_closes(rule) for rule in inside):
            marks = {rule["comment"]: int(rule["handle"]) for rule in inside if _ours(str(rule.get("comment", "")))}
            found.append(Chain(*place, marks))
    comments = [str(rule.get("comment", "")) for rule in rules if _is_own(rule, rule["table"])]
    return tuple(found), "" if own is None else (comments[0] if comments else "empty")


def _is_own(item: Mapping[str, Any], table: object) -> bool:
    return item.get("family") == "inet" and table == TABLE


def _ours(comment: str) -> bool:
    return comment.split(" ")[0] == MARK


def read_iptables(text: str) -> dict[str, str] | None:
    """Our rules in `iptables -S INPUT`, by comment; None when INPUT lets through what it does not know."""
    lines = [line for line in text.splitlines() if line.startswith(("-P INPUT", "-A INPUT"))]
    closing = re.compile(r"-P INPUT DROP|-A INPUT -j (DROP|REJECT)\b")
    if not any(closing.match(line) for line in lines):
        return None
    found = {}
    for line in lines:
        words = shlex.split(line)
        comment = words[words.index("--comment") + 1] if "--comment" in words else ""
        if _ours(comment):
            found[comment] = line
    return found


def read_ufw(text: str) -> dict[str, str]:
    """Our rules in `ufw show added`, by comment: the words that allow them, without the comment."""
    found = {}
    for line in text.splitlines():
        words = shlex.split(line) if line.startswith("ufw ") else []
        comment = words[words.index("comment") + 1] if "comment" in words[:-1] else ""
        if _ours(comment):
            found[comment] = " ".join(words[1 : words.index("comment")])
    return found


def sshd_ports(text: str) -> set[int]:
    """The ports of `sshd -T`."""
    return {
        int(number)
        for number in re.findall(r"^port (\d+)$|^listenaddress \S+:(\d+)$", text, re.MULTILINE)
        for number in number
        if number
    }


# ---- what has to be done: pure ------------------------------------------------------------------------------------------


def own_table(wanted: Wanted) -> str:
    """Our table as nft reads it: it closes a few ports and lets everything else through; empty when it has nothing to close."""
    rules = []
    mark = table_mark(wanted)
    if wanted.inner_ports:
        ports = ", ".join(str(port) for port in sorted(wanted.inner_ports))
        rules.append(f'iifname != "lo" tcp dport {{ {ports} }} drop comment "{mark}"')
    if wanted.port is not None and wanted.sources:
        rules.append(f'iifname "lo" tcp dport {wanted.port} accept comment "{mark}"')
        for family in ("ip", "ip6"):
            sources = ", ".join(wanted.marks(family).values())
            if sources:
                rules.append(f"{family} saddr {{ {sources} }} tcp dport {wanted.port} accept")
        rules.append(f"tcp dport {wanted.port} drop")
    if not rules:
        return ""
    lines = "\n".join(f"    {rule}" for rule in rules)
    head = "type filter hook input priority -10; policy accept;"
    return f"table inet {TABLE} {{\n  chain input {{\n    {head}\n{lines}\n  }}\n}}\n"


def table_mark(wanted: Wanted) -> str:
    """The comment in our table that tells what it was made for."""
    text = json.dumps([wanted.port if wanted.sources else None, sorted(wanted.sources), sorted(wanted.inner_ports)])
    return f"{MARK} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def missing(wanted: Wanted, state: State) -> list[str]:
    """What is not as wanted, a line each."""
    found = []
    mark = table_mark(wanted) if own_table(wanted) else ""
    if state.own_table != mark:
        found.append(f"table inet {TABLE} is not what it should be")
    for chain in state.chains:
        if set(chain.marks) != set(wanted.marks(chain.family)):
            found.append(
                f"chain {chain.family} {chain.table} {chain.name} drops what comes to port {wanted.port}, or has an old rule"
            )
    for program, marks in state.iptables.items():
        if set(marks) != set(wanted.marks("ip6" if program.startswith("ip6") else "ip")):
            found.append(f"{program}: INPUT drops what comes to port {wanted.port}, or has an old rule")
    if state.ufw is not None and set(state.ufw) != set(wanted.marks()):
        found.append(f"ufw does not allow port {wanted.port}, or has an old rule")
    if state.firewalld and wanted.port is not None and not state.firewalld_open:
        found.append(
            f"firewalld filters this host, and it is yours to open: firewall-cmd --permanent --add-port={wanted.port}/tcp && "
            "firewall-cmd --reload"
        )
    return found


def batch(wanted: Wanted, state: State) -> str:
    """What nft is told, all or nothing: our table anew, our rules in other chains as wanted."""
    lines = [f"table inet {TABLE}", f"delete table inet {TABLE}"]
    for chain in state.chains:
        place = f"{chain.family} {chain.table} {chain.name}"
        marks = wanted.marks(chain.family)
        lines += [f"delete rule {place} handle {handle}" for mark, handle in chain.marks.items() if mark not in marks]
        for mark, source in marks.items():
            if mark not in chain.marks:
                family = f"{'ip6' if ':' in source else 'ip'} saddr {source} " if source else ""
                lines.append(f'insert rule {place} {family}tcp dport {wanted.port} accept comment "{mark}"')
    return "\n".join(lines) + "\n" + own_table(wanted)


def other_commands(wanted: Wanted, state: State) -> list[list[str]]:
    """What ufw and iptables are told."""
    found = []
    if state.ufw is not None:
        marks = wanted.marks()
        found += [["ufw", "--force", "delete", *rule.split()] for mark, rule in state.ufw.items() if mark not in marks]
        for mark, source in marks.items():
            if mark not in state.ufw:
                where = ["from", source or "any", "to", "any", "port", str(wanted.port)]
                found.append(["ufw", "allow", "proto", "tcp", *where, "comment", mark])
    for program, present in state.iptables.items():
        marks = wanted.marks("ip6" if program.startswith("ip6") else "ip")
        for mark, rule in present.items():
            if mark not in marks:
                found.append([program, "-w", "-D", *shlex.split(rule)[1:]])
        for mark, source in marks.items():
            if mark not in present:
                where = ["-s", source] if source else []
                rule_words = ["-p", "tcp", *where, "--dport", str(wanted.port), "-m", "comment", "--comment", mark, "-j", "ACCEPT"]
                found.append([program, "-w", "-I", "INPUT", *rule_words])
    return found


def closes_ssh(wanted: Wanted, ssh_ports: Iterable[int]) -> list[str]:
    """Why this must not be done: what it closes is SSH's; empty when nothing speaks against it."""
    closed = {*wanted.inner_ports, *([wanted.port] if wanted.port is not None and wanted.sources else [])}
    return [
        f"port {port} is sshd's: nothing was changed; choose another gateway_listen or serve_port"
        for port in sorted(closed & set(ssh_ports))
    ]


# ---- what the machine says ----------------------------------------------------------------------------------------------


def ssh_ports() -> set[int]:
    """Where sshd listens by its configuration, and what it listens on and talks through now: also this very connection."""
    found = sshd_ports(run(["sshd", "-T"], deadline_s=DEADLINE_S).stdout) or {SSH_PORT}
    names = {process.pid: process.info["name"] or "" for process in psutil.process_iter(["name"])}
    for connection in psutil.net_connections(kind="tcp"):
        if names.get(connection.pid or 0, "").startswith(("sshd", "dropbear")):
            found.add(connection.laddr.port)  # type: ignore[union-attr]  # a listening or connected socket has an address
    return found


def _installed(*argv: str) -> str | None:
    """A program's output; None where it is not installed. Errors: ProcessError when it fails."""
    done = run([*argv], deadline_s=DEADLINE_S, env={"LC_ALL": "C"})
    if done.status == 127:
        return None
    if not done.ok:
        raise ProcessError(done)
    return done.stdout


def read_state(wanted: Wanted) -> State:
    """What filters this host now. Errors: ProcessError or ValueError when that can't be read."""
    added = _installed("ufw", "show", "added")
    active = added is not None and "Status: active" in (_installed("ufw", "status") or "")
    programs = {}
    managed = []
    for program, family in (("iptables", "ip"), ("ip6tables", "ip6")):
        text = _installed(program, "-w", "-S", "INPUT")
        if text is None:
            continue
        managed.append(family)
        marks = read_iptables(text)
        if marks is not None and not active:  # an active ufw is asked itself
            programs[program] = marks
    chains, own = read_ruleset(_installed("nft", "-j", "list", "ruleset") or "{}", managed=managed)
    firewalld = run(["systemctl", "is-active", "--quiet", "firewalld"], deadline_s=DEADLINE_S).ok
    opened = firewalld and run(["firewall-cmd", "--quiet", f"--query-port={wanted.port}/tcp"], deadline_s=DEADLINE_S).ok
    return State(chains, own, None if added is None else read_ufw(added), programs, firewalld, opened)


def apply(wanted: Wanted) -> None:
    """Have it as wanted. Errors: ProcessError, ValueError."""
    state = read_state(wanted)
    run(["nft", "-f", "-"], stdin=batch(wanted, state), deadline_s=DEADLINE_S, check=True)
    for argv in other_commands(wanted, state):
        run(argv, deadline_s=DEADLINE_S, env={"LC_ALL": "C"}, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.firewall", description="The gateway's port is open, SSH stays.")
    parser.add_argument("verb", choices=("apply", "check", "remove"))
    parser.add_argument("--settings", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        wanted = Wanted() if options.verb == "remove" else wanted_of(options.settings.read_text(encoding="utf-8"))
        wrong = closes_ssh(wanted, ssh_ports())
        if not wrong and options.verb != "check":
            apply(wanted)
        wrong = wrong or missing(wanted, read_state(wanted))
    except (OSError, ValueError, KeyError, TypeError, ProcessError, psutil.Error) as error:
        print(f"firewall: {error}", file=sys.stderr)
        return 2
    for line in wrong:
        print(f"firewall: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
