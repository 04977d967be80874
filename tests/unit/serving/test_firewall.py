"""What a host's firewall is told: the gateway's port let in where something drops it, engines' ports shut, SSH never in the way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving.firewall import (
    Chain,
    State,
    Wanted,
    batch,
    closes_ssh,
    missing,
    other_commands,
    own_table,
    read_iptables,
    read_ruleset,
    read_ufw,
    sshd_ports,
    table_mark,
    wanted_of,
)

OPEN = Wanted(8080, (), (8000,))
LIMITED = Wanted(8080, ("192.168.7.0/24", "fd00::/8"), (8000, 8001))
NOTHING = State((), "", None, {})
ACCEPT, DROP = {"accept": None}, {"drop": None}
PORT = {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 8080}}


def ruleset(chains: list[dict[str, object]], rules: list[dict[str, object]]) -> str:
    """As `nft -j list ruleset` prints it (libnftables-json(5))."""
    tables = sorted({(str(chain["family"]), str(chain["table"])) for chain in chains})
    return json.dumps(
        {
            "nftables": [
                {"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
                *({"table": {"family": family, "name": name, "handle": 1}} for family, name in tables),
                *({"chain": chain} for chain in chains),
                *({"rule": rule} for rule in rules),
            ]
        }
    )


def chain(policy: str, hook: str = "input", family: str = "inet", table: str = "filter", name: str = "input") -> dict[str, object]:
    return {
        "family": family,
        "table": table,
        "name": name,
        "handle": 1,
        "type": "filter",
        "hook": hook,
        "prio": 0,
        "policy": policy,
    }


def rule(*expr: object, comment: str = "", handle: int = 9, **place: str) -> dict[str, object]:
    where = {"family": "inet", "table": "filter", "chain": "input", **place}
    return {**where, "handle": handle, "expr": list(expr), **({"comment": comment} if comment else {})}


@pytest.mark.parametrize(
    ("chains", "rules", "closed"),
    [
        ([chain("drop")], [], True),
        ([chain("accept")], [rule(PORT, ACCEPT)], False),
        ([chain("accept")], [rule(PORT, ACCEPT), rule({"counter": {"packets": 0, "bytes": 0}}, {"reject": None})], True),
        ([chain("accept")], [rule(PORT, DROP)], False),  # this one drops what it knows: a list of the banned, say
        ([chain("drop", hook="forward")], [], False),
        ([chain("drop", table="laoka")], [], False),
        ([chain("drop", table="firewalld", name="filter_INPUT")], [], False),
        ([chain("drop", family="ip", name="INPUT")], [], False),  # iptables' own
        ([chain("drop", family="ip6", name="INPUT")], [], True),
    ],
)
def test_which_chains_close_a_host(chains: list[dict[str, object]], rules: list[dict[str, object]], closed: bool) -> None:
    found, own = read_ruleset(ruleset(chains, rules), managed=("ip",))
    assert bool(found) == closed and own == ("empty" if chains[0]["table"] == "laoka" else "")


def test_our_rules_are_known_by_their_comments() -> None:
    rules = [rule(PORT, ACCEPT, comment="laoka 8080", handle=7), rule(PORT, ACCEPT, comment="laokai"), rule(PORT, ACCEPT)]
    own = rule(DROP, comment=table_mark(OPEN), table="laoka")
    found = read_ruleset(ruleset([chain("drop"), chain("accept", table="laoka")], [*rules, own]))
    assert found == ((Chain("inet", "filter", "input", {"laoka 8080": 7}),), table_mark(OPEN))


def test_a_port_is_opened_where_it_is_closed_and_an_old_rule_goes() -> None:
    closed = Chain("inet", "filter", "input", {"laoka 9999": 4})
    lines = batch(OPEN, State((closed,), "", None, {})).splitlines()
    assert "delete rule inet filter input handle 4" in lines
    assert 'insert rule inet filter input tcp dport 8080 accept comment "laoka 8080"' in lines
    assert lines[:2] == ["table inet laoka", "delete table inet laoka"]
    done = State((Chain("inet", "filter", "input", {"laoka 8080": 5}),), table_mark(OPEN), None, {})
    assert missing(OPEN, done) == [] and not any(" rule " in f" {line}" for line in batch(OPEN, done).splitlines())


def test_each_familys_chain_gets_the_networks_of_its_family() -> None:
    told = batch(
        LIMITED, State((Chain("ip", "a", "in", {}), Chain("ip6", "b", "in", {}), Chain("inet", "c", "in", {})), "", None, {})
    )
    inserted = [line.split(" tcp ")[0] for line in told.splitlines() if line.startswith("insert")]
    assert inserted == [
        "insert rule ip a in ip saddr 192.168.7.0/24",
        "insert rule ip6 b in ip6 saddr fd00::/8",
        "insert rule inet c in ip saddr 192.168.7.0/24",
        "insert rule inet c in ip6 saddr fd00::/8",
    ]


def test_our_own_table_closes_the_engines_ports_and_with_networks_the_gateways() -> None:
    rules = [line.strip() for line in own_table(LIMITED).splitlines() if "dport" in line]
    assert [words.split(" comment")[0] for words in rules] == [
        'iifname != "lo" tcp dport { 8000, 8001 } drop',
        'iifname "lo" tcp dport 8080 accept',
        "ip saddr { 192.168.7.0/24 } tcp dport 8080 accept",
        "ip6 saddr { fd00::/8 } tcp dport 8080 accept",
        "tcp dport 8080 drop",
    ]
    assert "8080" not in own_table(OPEN)
    assert own_table(Wanted()) == own_table(Wanted(8080)) == ""


@given(
    st.none() | st.integers(1, 65535),
    st.lists(st.integers(1, 65535), max_size=4),
    st.lists(st.sampled_from(["10.0.0.0/8", "192.168.7.21/32", "fd00::/8"]), max_size=3, unique=True),
)
def test_whatever_is_wanted_everything_else_is_let_through(port: int | None, inner: list[int], sources: list[str]) -> None:
    wanted = Wanted(port, tuple(sources), tuple(inner))
    table = own_table(wanted)
    assert "policy drop" not in table
    for line in table.splitlines():
        if line.strip().endswith("drop") or " drop " in line:
            assert "tcp dport" in line, "it drops more than a port"
    closed = {*inner, *([port] if port is not None and sources else [])}
    assert bool(closes_ssh(wanted, {22})) == (22 in closed)
    assert closes_ssh(wanted, set()) == []


def test_ufw_is_asked_and_what_it_was_asked_before_is_taken_back() -> None:
    # As `ufw show added` prints it (ufw 0.36).
    added = (
        "Added user rules (see 'ufw status' for running firewall):\nufw allow 22/tcp\n"
        "ufw allow 9999/tcp comment 'laoka 9999'\n"
        "ufw allow from 192.168.7.0/24 to any port 9998 proto tcp comment 'laoka 9998 from x'\n"
    )
    ours = read_ufw(added)
    assert ours == {"laoka 9999": "allow 9999/tcp", "laoka 9998 from x": "allow from 192.168.7.0/24 to any port 9998 proto tcp"}
    told = other_commands(OPEN, State((), "", ours, {}))
    assert told[0] == ["ufw", "--force", "delete", "allow", "9999/tcp"]
    assert told[-1] == ["ufw", "allow", "proto", "tcp", "from", "any", "to", "any", "port", "8080", "comment", "laoka 8080"]
    assert other_commands(OPEN, State((), "", {"laoka 8080": "allow 8080/tcp"}, {})) == []


def test_iptables_is_told_only_where_input_closes_the_host() -> None:
    # As `iptables -S INPUT` prints it.
    assert read_iptables("-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n") is None
    assert read_iptables("-P INPUT DROP\n") == {}
    assert read_iptables("-P INPUT ACCEPT\n-A INPUT -j REJECT --reject-with icmp-host-prohibited\n") == {}
    line = '-A INPUT -p tcp -m tcp --dport 9999 -m comment --comment "laoka 9999" -j ACCEPT'
    ours = read_iptables(f"-P INPUT DROP\n{line}\n")
    assert ours == {"laoka 9999": line}
    removed, added = other_commands(LIMITED, State((), "", None, {"ip6tables": ours}))
    assert removed[:4] == ["ip6tables", "-w", "-D", "INPUT"] and "laoka 9999" in removed
    assert added[:4] == ["ip6tables", "-w", "-I", "INPUT"] and added[added.index("-s") + 1] == "fd00::/8" and added[-1] == "ACCEPT"


def test_what_is_not_as_wanted_is_told() -> None:
    assert missing(Wanted(), NOTHING) == [] and len(missing(OPEN, NOTHING)) == 1
    assert "chain inet filter input" in missing(OPEN, State((Chain("inet", "filter", "input", {}),), table_mark(OPEN), None, {}))[0]
    assert "ufw" in missing(OPEN, State((), table_mark(OPEN), {}, {}))[0]
    assert "iptables" in missing(OPEN, State((), table_mark(OPEN), None, {"iptables": {}}))[0]
    told = missing(OPEN, State((), table_mark(OPEN), None, {}, firewalld=True))
    assert "firewall-cmd --permanent --add-port=8080/tcp" in told[0]
    assert missing(OPEN, State((), table_mark(OPEN), None, {}, firewalld=True, firewalld_open=True)) == []
    assert table_mark(LIMITED) != table_mark(Wanted(8080, ("192.168.7.0/24",), (8000, 8001)))


def test_sshds_ports() -> None:
    # As `sshd -T` prints them.
    assert sshd_ports("port 22\nport 2222\naddressfamily any\nlistenaddress [::]:22\nlistenaddress 10.0.0.1:2022\n") == {
        22,
        2222,
        2022,
    }


def test_the_settings_file() -> None:
    text = json.dumps({"port": 8080, "sources": ["192.168.7.0/24"], "inner_ports": [8000]})
    assert wanted_of(text) == Wanted(8080, ("192.168.7.0/24",), (8000,))
    for wrong in (
        '{"port": 8080}',
        '{"port": "x", "sources": [], "inner_ports": []}',
        '{"port": 1, "sources": ["x"], "inner_ports": []}',
    ):
        with pytest.raises((ValueError, KeyError)):
            wanted_of(wrong)
