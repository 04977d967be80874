"""How a served engine dies and freezes, with the real vLLM on CPU: each end is named, nothing is left over, and it comes back.

The card is simulated; the engine's processes, systemd and what they do to each other are real. Each drill waits until the unit is
ready again: a start takes 20 s and more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from laoka.sandbox import endpoint, faults, hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import PYTHON, until
from tests.served.serving import (
    CHAT,
    START_DEADLINE_S,
    InFlight,
    Record,
    engine_processes,
    post,
    record,
    running_requests,
    show,
    until_failed,
    until_ready,
)

pytestmark = pytest.mark.sandbox


DROP_IN = "/etc/systemd/system/qwen-serve.service.d/drill.conf"
NAMED_S = 120
"""How long a busy machine may take until an end that is there at once, or after the 20 s of serve_frozen_after_s, has its name."""


@pytest.fixture(scope="module")
def host(served: HostFolder) -> Iterator[HostFolder]:
    until_ready(served, 0)
    yield served
    # Whatever a drill that failed left: the unit as it was deployed, and the model served.
    script = f"systemctl stop squatter; rm -f {DROP_IN}; systemctl daemon-reload; systemctl start qwen-serve qwen-watchdog"
    hosts.execute(served, script, deadline_s=300, check=True)
    until_ready(served, 0)


@pytest.fixture(scope="module")
def alone(host: HostFolder) -> HostFolder:
    """Without the watchdog, which restarts an engine that does not answer too; and without the long wait after a failure."""
    write = f"mkdir -p {DROP_IN.rpartition('/')[0]} && printf '[Service]\\nRestartSec=1s\\n' > {DROP_IN}"
    hosts.execute(host, f"systemctl stop qwen-watchdog && {write} && systemctl daemon-reload", deadline_s=60, check=True)
    return host


@pytest.fixture
def ready(alone: HostFolder) -> HostFolder:
    """Served, whatever the drill before left: one that fails takes no other with it."""
    hosts.execute(alone, "systemctl reset-failed qwen-serve; systemctl start qwen-serve", deadline_s=START_DEADLINE_S)
    until_ready(alone, 0)
    return alone


def completion_kind(host: HostFolder, deadline_s: float) -> str:
    """What laoka's own question says of the server, by name."""
    done = hosts.execute(
        host,
        f"{PYTHON} -m laoka.serving.completion ask --url http://127.0.0.1:8000 --model tiny-qwen3 --no-judge-text "
        f"--deadline-s {deadline_s} --json",
        deadline_s=deadline_s + 30,
    )
    return str(json.loads(done.stdout)["kind"])


def comes_back(host: HostFolder, failed: Record, before: set[int], restarts: int) -> None:
    """systemd ended what was left of the old engine, counted a restart, and the new one is ready."""
    ready = until_ready(host, failed.since_unix_s)
    assert not before & engine_processes(host), "a process of the old engine is left"
    assert ready.start_s is not None and int(show(host, "NRestarts")[0]) == restarts + 1
    assert post(host, max_tokens=2).status == 200


def restarts_of(host: HostFolder) -> int:
    return int(show(host, "NRestarts")[0])


def test_engine_killed_the_server_exits_0_and_that_is_a_failure(host: HostFolder) -> None:
    """With the watchdog at work, which must not restart once more what systemd is starting: there is one restart."""
    before, restarts = engine_processes(host), restarts_of(host)
    faults.apply(host, "engine-killed", clear=False)
    failed = until_failed(host, NAMED_S)
    assert failed.kind == "engine_died" and "status 0" in failed.detail and "48966" in failed.detail
    comes_back(host, failed, before, restarts)


@pytest.mark.long
def test_a_start_that_is_slow_here_gets_the_time_that_was_measured_and_not_systemds(ready: HostFolder) -> None:
    host, file, began = ready, "/var/lib/qwen-serve/starts.json", time.time()
    kept = json.loads(hosts.execute(host, f"cat {file}", check=True).stdout)["starts_s"]
    assert kept[-1] == record(host).start_s, "the last start was not measured"
    short = DROP_IN.replace("drill", "short")
    hosts.execute(host, f"printf '[Service]\nTimeoutStartSec=5s\n' > {short}; systemctl daemon-reload", check=True)
    hosts.execute(host, f"cat > {file}", stdin=json.dumps({"starts_s": [500.5]}), check=True)
    try:
        hosts.execute(host, "systemctl restart qwen-serve", deadline_s=START_DEADLINE_S, check=True)
        found = until_ready(host, began)
        assert found.start_s is not None and found.start_s > 5, "too fast to show anything"
        said = hosts.execute(host, f"journalctl -u qwen-serve -o cat --no-pager --since @{began:.0f}", check=True).stdout
        assert "this start may take 1560 s: the longest of 1 measured was 500 s" in said
        environment = hosts.execute(host, f"tr '\\0' '\\n' < /proc/{min(engine_processes(host))}/environ", check=True).stdout
        assert "VLLM_ENGINE_READY_TIMEOUT_S=1560" in environment.split("\n")
        print(f"\na start of {found.start_s:.1f} s under TimeoutStartSec=5s came up")
    finally:
        hosts.execute(host, f"rm {short}; systemctl daemon-reload", check=True)
        hosts.execute(host, f"cat > {file}", stdin=json.dumps({"starts_s": kept}), check=True)


def test_engine_frozen_while_idle_health_says_200_and_only_a_completion_finds_it(ready: HostFolder) -> None:
    host = ready
    before, restarts = engine_processes(host), restarts_of(host)
    faults.apply(host, "engine-frozen", clear=False)
    codes = hosts.execute(
        host, "for p in health ping v1/models metrics; do curl -s -m 5 -o /dev/null -w '%{http_code} ' 127.0.0.1:8000/$p; done"
    )
    assert codes.stdout.split() == ["200"] * 4 and running_requests(host) == 0
    assert completion_kind(host, 5) == "engine_frozen"
    failed = until_failed(host, NAMED_S)
    assert failed.kind == "engine_frozen" and "/health answers 200" in failed.detail
    assert "VLLM::EngineCor" in failed.engine and "stopped" in failed.engine
    comes_back(host, failed, before, restarts)


@pytest.mark.long
def test_engine_frozen_in_mid_request_is_told_from_a_busy_one(ready: HostFolder) -> None:
    host = ready
    before, restarts = engine_processes(host), restarts_of(host)
    flight = InFlight(host, max_tokens=3900, stream=True)
    frozen = hosts.execute(host, flight.when_begun(faults.signal_script(faults.ENGINE, "STOP")), deadline_s=90, check=True)
    assert "signalled" in frozen.stdout, "the engine is frozen while the request runs"
    failed = until_failed(host, NAMED_S)
    assert failed.kind == "engine_frozen" and "requests running" in failed.detail and "no token for" in failed.detail
    assert flight.result().body.startswith("data: ") and "[DONE]" not in flight.result().body
    comes_back(host, failed, before, restarts)


@pytest.mark.long
def test_worker_frozen_the_client_gets_an_error_and_the_engine_gives_up_by_itself(ready: HostFolder) -> None:
    host = ready
    before, restarts = engine_processes(host), restarts_of(host)
    faults.apply(host, "worker-frozen", clear=False)
    answer = post(host, max_tokens=4)
    assert answer.status == 500 and "error" in answer.json()
    failed = until_failed(host, NAMED_S)
    assert failed.kind == "engine_died"
    comes_back(host, failed, before, restarts)


def test_api_server_killed_leaves_no_orphan_that_keeps_the_memory(ready: HostFolder) -> None:
    host = ready
    before, restarts = engine_processes(host), restarts_of(host)
    assert len(before) == 3
    faults.apply(host, "server-killed", clear=False)
    failed = until_failed(host, NAMED_S)
    assert failed.kind == "server_killed" and "signal 9" in failed.detail
    until(lambda: not before & engine_processes(host), 60, "engine and worker are gone too")
    comes_back(host, failed, before, restarts)


def test_stopped_with_requests_in_flight_they_are_finished(ready: HostFolder) -> None:
    host = ready
    flights = [InFlight(host, max_tokens=3900, stream=stream) for stream in (True, False)]
    hosts.execute(host, flights[0].when_begun("systemctl stop qwen-serve", connections=2), deadline_s=150, check=True)
    streamed, whole = (flight.result() for flight in flights)
    assert (
        streamed.status == 200 and streamed.body.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in streamed.body
    )
    assert whole.status == 200 and whole.json()["usage"]["completion_tokens"] == 3900
    assert show(host, "ActiveState", "Result") == ("inactive", "success")
    assert record(host).state == "stopped" and engine_processes(host) == set()


@contextmanager
def flags_changed(host: HostFolder, change: str) -> Iterator[None]:
    """The unit, stopped, with its flags changed by a sed script; afterwards they are as they were."""
    config = "/etc/qwen-serve/vllm.yaml"
    hosts.execute(host, "systemctl stop qwen-serve; systemctl reset-failed qwen-serve", deadline_s=90)
    hosts.execute(host, f"cp -p {config} /root/vllm.yaml && sed -i '{change}' {config}", check=True)
    try:
        yield
    finally:
        hosts.execute(host, f"cp -p /root/vllm.yaml {config}", check=True)


def start(host: HostFolder) -> str:
    """Start the unit, which is to fail; systemd's word for what it is then."""
    hosts.execute(host, "systemctl start qwen-serve", deadline_s=START_DEADLINE_S)
    return show(host, "ActiveState")[0]


def test_a_flag_that_the_engine_refuses_is_final_named_and_told(alone: HostFolder) -> None:
    host = alone
    known = len(endpoint.read_alerts(host.lab.alerts))
    hosts.execute(host, "systemctl start qwen-watchdog", deadline_s=60, check=True)
    with flags_changed(host, "$ a no-such-flag: 1"):
        assert start(host) == "failed"
    found = record(host)
    assert (found.state, found.kind) == ("failed", "bad_flag") and "unrecognized arguments: --no-such-flag" in found.detail
    assert show(host, "ExecMainStatus") == ("2",)
    until(
        lambda: any("would not help" in str(alert) for alert in endpoint.read_alerts(host.lab.alerts)[known:]),
        120,
        "the watchdog told that it is a person's",
    )
    assert show(host, "ActiveState", "ExecMainStatus") == ("failed", "2"), "and left it alone"
    last_word = hosts.execute(host, "journalctl -t qwen-serve-failed -o cat -n 3 --no-pager", check=True).stdout
    assert "down for good: the watchdog tells" in last_word
    hosts.execute(host, "systemctl stop qwen-watchdog", deadline_s=60, check=True)


def test_a_context_that_the_model_does_not_have_is_final_and_named(alone: HostFolder) -> None:
    with flags_changed(alone, "s/^max-model-len:.*/max-model-len: 999999/"):
        assert start(alone) == "failed"
    found = record(alone)
    assert found.kind == "context_too_long" and "999999" in found.detail and "max-model-len" in found.fix


def test_a_model_that_is_not_there_is_named_and_waited_for(alone: HostFolder) -> None:
    host, since = alone, time.time()
    with flags_changed(host, 's#^model:.*#model: "/srv/none"#'):
        hosts.execute(host, "systemctl start --no-block qwen-serve", check=True)
        found = until_failed(host, NAMED_S, since)
        until(lambda: int(show(host, "NRestarts")[0]) >= 1, 60, "it is started again")
        hosts.execute(host, "systemctl stop qwen-serve", deadline_s=90, check=True)
    assert found.kind == "model_missing" and "/srv/none" in found.detail


@pytest.mark.long
def test_a_port_that_is_taken_is_named_at_once_and_waited_for(alone: HostFolder) -> None:
    host = alone
    hosts.execute(host, "systemd-run --collect --unit squatter python3 -m http.server --bind 127.0.0.1 8000", check=True)
    until(lambda: post(host, 5).status == 501, 60, "somebody else has the port")
    since = time.time()
    hosts.execute(host, "systemctl reset-failed qwen-serve; systemctl start --no-block qwen-serve", check=True)
    found = until_failed(host, NAMED_S, since)
    assert found.kind == "port_taken" and "127.0.0.1:8000" in found.detail and engine_processes(host) == set()
    hosts.execute(host, "systemctl stop squatter", check=True)
    until_ready(host, found.since_unix_s)
    assert post(host, max_tokens=2, messages=CHAT["messages"]).status == 200
