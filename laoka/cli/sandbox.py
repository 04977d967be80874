"""`laoka sandbox`: throw-away hosts on this machine with a simulated V100."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from laoka.catalog.messages import Language, text
from laoka.process import ProcessError
from laoka.sandbox import demo, endpoint, faults, hosts
from laoka.sandbox.lab import HostFolder, Lab, SandboxError, open_lab


class Told(click.Group):
    """A group whose expected errors end in one line on stderr and exit status 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (SandboxError, ProcessError) as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=Told)
@click.option("--lab", "lab_name", help="Which lab (default: demo); each has hosts and a network of its own.")
@click.pass_context
def command(ctx: click.Context, lab_name: str | None) -> None:
    """Throw-away hosts on this machine: real Debian, systemd, apt, sshd and reboots; a simulated V100.

    Needs root. Nothing of this machine's own system is touched; `down` undoes what the network needed.
    """
    lang: Language = ctx.obj or "en"
    ctx.obj = (open_lab(lab_name), lang)


@command.command()
@click.argument("count", type=int, default=1)
@click.pass_obj
def up(obj: tuple[Lab, Language], count: int) -> None:
    """Bring hosts 1 to COUNT up (default 1)."""
    lab, lang = obj
    click.echo(text("sandbox.bringing_up", lang, count=count, lab=lab.name), err=True)
    started = time.monotonic()
    for host in hosts.up(lab, count, lambda line: click.echo(line, err=True)):
        click.echo(text("sandbox.up", lang, name=host.name, address=host.address, seconds=time.monotonic() - started))


@command.command()
@click.pass_obj
def down(obj: tuple[Lab, Language]) -> None:
    """End all hosts of the lab and undo what they needed; downloads are kept."""
    lab, lang = obj
    hosts.check_machine()
    count = hosts.down(lab)
    click.echo(text("sandbox.down", lang, lab=lab.name, count=count, cache=lab.cache))


@command.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.pass_obj
def status(obj: tuple[Lab, Language], as_json: bool) -> int:
    """What is up, which faults are on, what alerts came. Exit status 1 when a host is not answering."""
    lab, _ = obj
    rows = [_status(host) for host in hosts.listed(lab)]
    received = endpoint.read_alerts(lab.alerts)
    if as_json:
        click.echo(json.dumps({"lab": lab.name, "hosts": rows, "alerts": received}, ensure_ascii=False))
    else:
        for row in rows:
            state = "answers" if row["ssh"] else ("runs, no sshd" if row["running"] else "is off")
            on = ", ".join(row["faults"]) or "none"
            click.echo(f"{row['name']:<10}{row['address']:<14}{state:<15}card: {row['card']} (simulated)  faults: {on}")
        click.echo(f"alerts received: {len(received)}")
        for alert in received[-3:]:
            content = alert["content"]
            shown = content.get("title") if isinstance(content, dict) else str(content)[:100]
            click.echo(f"  {time.strftime('%H:%M:%S', time.localtime(float(str(alert['received_unix_s']))))}  {shown}")
    return 0 if all(row["ssh"] for row in rows) else 1


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def ssh(obj: tuple[Lab, Language], name: str, words: tuple[str, ...]) -> None:
    """Log in to host NAME as root, or run a command there."""
    host = _find(obj[0], name)
    argv = [*hosts.ssh_argv(host), *(["--", *words] if words else [])]
    os.execvp(argv[0], argv)  # noqa: S606 - the terminal is ssh's from here on


@command.command()
@click.argument("fault", required=False)
@click.argument("name", required=False)
@click.option("--clear", is_flag=True, help="Take the fault back.")
@click.pass_obj
def fault(obj: tuple[Lab, Language], fault: str | None, name: str | None, clear: bool) -> None:
    """Bring FAULT about on host NAME (default v100-1), or take it back; without FAULT, list them."""
    if fault is None:
        for item in faults.catalogue().values():
            click.echo(f"{item.name:<16}{item.about}")
        return
    host = _find(obj[0], name or "v100-1")
    faults.apply(host, fault, clear=clear)
    click.echo(f"{host.name}: {fault} {'taken back' if clear else 'is on'}")


@command.command(name="demo")
@click.argument("count", type=int, default=1)
@click.pass_obj
def demo_command(obj: tuple[Lab, Language], count: int) -> int:
    """Run the main job: hosts up, deploys/full.py, a question answered, checks and watchdog shown."""
    lab, lang = obj
    return demo.run_demo(lab, count, lang)


def _find(lab: Lab, name: str) -> HostFolder:
    found = [host for host in hosts.listed(lab) if host.name == name]
    if not found:
        names = ", ".join(host.name for host in hosts.listed(lab))
        raise SandboxError(f"no sandbox host is called {name}; there are: {names}")
    return found[0]


def _status(host: HostFolder) -> dict[str, Any]:
    return {
        "name": host.name,
        "address": host.address,
        "running": hosts.is_up(host),
        "ssh": hosts.wait_for_ssh(host, 1),
        "card": ", ".join(item.name for item in hosts.cards(host)),
        "faults": list(faults.active(host)),
    }
