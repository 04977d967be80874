"""What tests on a served host share: requests to its engine from the host itself, its unit and its readiness record."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from laoka.serving.record import Record, path_of
from tests.hosts import until

UNIT = "qwen-serve"
START_DEADLINE_S = 240
CHAT = {"model": "tiny-qwen3", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Answer:
    """What curl on the host got: status 0 when there was no answer at all."""

    status: int
    seconds: float
    body: str

    def json(self) -> Any:
        return json.loads(self.body)


def post(host: HostFolder, deadline_s: float = 60, port: int = 8000, copy: str = "/dev/null", **body: object) -> Answer:
    """Ask the engine on the host for a chat completion; what comes is written to `copy` there as it comes."""
    done = hosts.execute(
        host,
        f"curl -sN -m {deadline_s} -H 'Content-Type: application/json' -d @- -w '\\n%{{http_code}} %{{time_total}}' "
        f"http://127.0.0.1:{port}/v1/chat/completions | tee {copy}",
        stdin=json.dumps({**CHAT, **body}),
        deadline_s=deadline_s + 20,
    )
    body_text, _, figures = done.stdout.rpartition("\n")
    status, seconds = figures.split()
    return Answer(int(status), float(seconds), body_text)


class InFlight(threading.Thread):
    """A request that runs while something is done to the server; `answer` is there when it is over."""

    def __init__(self, host: HostFolder, **body: object) -> None:
        super().__init__(daemon=True)
        self.host, self.body = host, body
        self.copy = f"/run/in-flight-{id(self)}"
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        self.answer = post(self.host, 120, copy=self.copy, **self.body)

    def when_begun(self, then: str, *, connections: int = 1) -> str:
        """A shell script that runs `then` as soon as a part of the streamed answer came and so many requests are connected to the
        engine; it ends with status 3 after a minute.

        On the host, and at once: a tiny model may be through before somebody outside has looked, and the engine's own counters
        answer late while it streams on a small machine.
        """
        connected = f"[ $(ss -Htn state established '( dport = :8000 )' | wc -l) -ge {connections} ]"
        runs = f'[ "$(head -c 5 {self.copy} 2>/dev/null)" = data: ]'
        return f"n=0; until {runs} && {connected}; do sleep 0.05; n=$((n + 1)); [ $n -lt 1200 ] || exit 3; done; {then}"

    def result(self) -> Answer:
        self.join(150)
        assert self.answer is not None, "the request never ended"
        return self.answer


def running_requests(host: HostFolder) -> float:
    """How many requests the engine says that it works on."""
    text = hosts.execute(host, "curl -s -m 5 127.0.0.1:8000/metrics | grep ^vllm:num_requests_running").stdout
    return float(text.split()[-1]) if text else 0.0


def record(host: HostFolder, unit: str = UNIT) -> Record:
    """The readiness record on the host, read as any reader would."""
    text = hosts.execute(host, f"cat {path_of(unit)}", check=True).stdout
    return Record(**json.loads(text))


def show(host: HostFolder, *names: str, unit: str = UNIT) -> tuple[str, ...]:
    """Properties of a unit, in the order asked for."""
    text = hosts.execute(host, f"systemctl show {unit} {' '.join(f'-p {name}' for name in names)}", check=True).stdout
    values = dict(line.split("=", 1) for line in text.splitlines())
    return tuple(values[name] for name in names)


def engine_processes(host: HostFolder) -> set[int]:
    """Ids of vLLM's processes on the host, whatever group they are in."""
    lines = hosts.execute(host, "ps -eo pid=,comm=", check=True).stdout.splitlines()
    return {int(line.split()[0]) for line in lines if line.split()[1].startswith(("vllm", "VLLM::"))}


def until_failed(host: HostFolder, deadline_s: float, since_unix_s: float = 0) -> Record:
    """Wait until the unit has noted a failure after a time, and return what it noted.

    The host itself looks: systemd may start the unit again, and the note be gone, before somebody outside has looked twice.
    """
    script = (
        "import json, sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end:\n"
        "    found = json.load(open('/run/qwen-serve/state.json'))\n"
        "    if found['state'] == 'failed' and found['since_unix_s'] > float(sys.argv[2]):\n"
        "        print(json.dumps(found)); break\n    time.sleep(0.05)\n"
    )
    done = hosts.execute(host, f"python3 - {deadline_s} {since_unix_s}", stdin=script, deadline_s=deadline_s + 30)
    assert done.stdout, f"after {deadline_s} s the unit notes no failure: {record(host)} {done.stderr}"
    return Record(**json.loads(done.stdout))


def until_ready(host: HostFolder, since_unix_s: float, unit: str = UNIT) -> Record:
    """Wait until the unit is ready again after a time."""

    def ready() -> Record | None:
        found = record(host, unit)
        return found if found.state == "ready" and found.since_unix_s > since_unix_s else None

    found: Record = until(ready, START_DEADLINE_S, f"{unit} is ready again")
    return found
