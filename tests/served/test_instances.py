"""Two servers on one host, qwen-serve@one and @two: `systemctl restart qwen-serve` means both, one that is down is done without."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from laoka.sandbox import endpoint, hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, pyinfra, until
from tests.served.client import Gateway, chat
from tests.served.serving import UNIT, engine_processes, record, show
from tests.served.test_rollout import SERVE, asking, inventory

pytestmark = pytest.mark.sandbox
WATCHDOG = "deploys/watchdog.py"
PORTS = {"one": 8001, "two": 8002}
PORTS_OF = {name: {"port": port} for name, port in PORTS.items()}
FLAGS_OF_TWO = "/etc/qwen-serve/two/vllm.yaml"
STOP_WATCHDOG = "systemctl stop qwen-watchdog"
"""It would take the change for a dead engine; deploys/watchdog.py starts it again (docs/serving.md)."""


def answered(host: HostFolder, port: int) -> float:
    """How many requests an engine has finished."""
    text = hosts.execute(host, f"curl -s -m 5 127.0.0.1:{port}/metrics | grep ^vllm:request_success_total").stdout
    return sum(float(line.split()[-1]) for line in text.splitlines())


def alerts(host: HostFolder) -> list[dict[str, object]]:
    """What people were told so far."""
    return endpoint.read_alerts(host.lab.alerts)


def asked(host: HostFolder) -> str:
    """Which engine the watchdog asks; it runs."""
    return hosts.execute(host, "systemctl is-active -q qwen-watchdog && grep completion_url /etc/laoka/watchdog.toml").stdout


@pytest.mark.long
def test_two_instances_and_back_to_one(served: HostFolder, tmp_path: Path) -> None:
    host, gateway = served, Gateway(served)
    names = {name: f"{UNIT}@{name}" for name in PORTS}
    key = tmp_path / "engine-key"
    key.write_text("only-for-the-engines-4711\n")
    several = {"serve_instances": PORTS_OF, "serve_api_key_file": str(key)}
    change = f"_data = {{**_data, **{several!r}}}"
    wanted, limit = (inventory(tmp_path, change), SERVE, WATCHDOG), ("--limit", host.name)
    hosts.execute(host, STOP_WATCHDOG, deadline_s=60, check=True)
    try:
        done = pyinfra(host.lab, "-y", *limit, *wanted)
        assert (done.status, done.failed(host.name)) == (0, []), done.stderr
        assert show(host, "MainPID", "ActiveState") == ("0", "active"), "the single server still runs"
        ready = {name: record(host, unit) for name, unit in names.items()}
        assert {item.state for item in ready.values()} == {"ready"} and len(engine_processes(host)) == 6
        assert "127.0.0.1:8001" in asked(host)
        # Their own key came by systemd's credentials, and is the guard's and the watchdog's alone.
        models = "curl -s -m 5 -o /dev/null -w '%{http_code}' 127.0.0.1:8001/v1/models"
        assert hosts.execute(host, models).stdout == "401"
        assert key.read_text().strip() not in hosts.execute(host, "ps -eo args", check=True).stdout
        until(lambda: gateway.get("/health").status == 200, 30, "the gateway has its servers")
        before = {name: answered(host, port) for name, port in PORTS.items()}
        assert {gateway.post(chat(max_tokens=2)).status for _ in range(6)} == {200}
        assert all(answered(host, port) > before[name] for name, port in PORTS.items()), "one of them got nothing to do"
        assert pyinfra(host.lab, "--dry", *limit, *wanted).planned(host.name) == []

        # One is changed: the other serves on, and whoever asks meanwhile gets each answer.
        ready_of_one, began = record(host, names["one"]), time.time()
        fewer = {**PORTS_OF, "two": {**PORTS_OF["two"], "flags": {"max-num-seqs": 3}}}
        changed = inventory(tmp_path, f"_data = {{**_data, **{ {**several, 'serve_instances': fewer}!r}}}")
        with asking(gateway):
            done = pyinfra(host.lab, "-y", *limit, changed, SERVE)
        assert (done.status, done.failed(host.name)) == (0, []), done.stderr
        assert record(host, names["one"]) == ready_of_one and record(host, names["two"]).since_unix_s > began
        assert hosts.execute(host, "ls /run/qwen-guard/*drain 2>/dev/null").stdout == "", "a mark was left"

        # One is down for good: people are told although the watchdog runs, the other serves on, and everybody is answered.
        known = len(alerts(host))
        hosts.execute(host, f"echo 'no-such-flag: 1' >> {FLAGS_OF_TWO}; systemctl restart {names['two']}", deadline_s=90)
        found = record(host, names["two"])
        assert (found.state, found.kind) == ("failed", "bad_flag") and record(host, names["one"]) == ready["one"]
        until(
            lambda: any(f"{names['two']}.service is down for good" in str(alert) for alert in alerts(host)[known:]),
            60,
            "somebody is told",
        )
        assert {gateway.post(chat(max_tokens=2)).status for _ in range(6)} == {200}
        hosts.execute(host, f"sed -i '/no-such-flag/d' {FLAGS_OF_TWO}", check=True)

        # The name that people know is all of them.
        began = time.time()
        hosts.execute(host, f"systemctl restart {UNIT}", deadline_s=400, check=True)
        restarted = [record(host, unit) for unit in names.values()]
        assert all(item.state == "ready" and item.since_unix_s > began for item in restarted)
        assert show(host, "ActiveState") == ("active",)
    finally:
        hosts.execute(host, STOP_WATCHDOG, deadline_s=60)
        done = pyinfra(host.lab, "-y", *limit, INVENTORY, SERVE, WATCHDOG)
    assert (done.status, done.failed(host.name)) == (0, []), done.stderr
    assert record(host).state == "ready" and len(engine_processes(host)) == 3
    assert hosts.execute(host, "ls /etc/systemd/system/qwen-serve@*.service").stdout == "" and "127.0.0.1:8000" in asked(host)
    until(lambda: gateway.post(chat(max_tokens=2)).status == 200, 30, "the single server answers")
    # Nothing of what the inventory had once: no key, no files of the instances, and the run said so.
    assert "/etc/qwen-serve/api-key is removed: no setting asks for it any more" in done.stderr
    assert hosts.execute(host, "grep -rl only-for-the-engines /etc /run /opt/laoka /var/lib/laoka /var/lib/qwen-serve").stdout == ""
    listed = hosts.execute(host, "ls /etc/qwen-serve /var/lib/laoka/staged; ls -d /var/*/qwen-serve/one /run/qwen-serve/*").stdout
    assert listed.split() == [
        "/etc/qwen-serve:", "env", "vllm.yaml", "/var/lib/laoka/staged:", "qwen-serve.service", "/run/qwen-serve/state.json",
    ]  # fmt: skip
    assert pyinfra(host.lab, "--dry", *limit, INVENTORY, SERVE, WATCHDOG).planned(host.name) == []
