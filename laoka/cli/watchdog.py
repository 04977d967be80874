"""`laoka watchdog`: on the host, what the watchdog sees, and the proof that alerts arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from laoka.agent import channels, drill, outbox, state, wording
from laoka.agent.config import DEFAULT_PATH, Config, ConfigError, load_config
from laoka.catalog.messages import Language, text
from laoka.cli.check import HOSTS_AT_ONCE, ssh_target
from laoka.cli.inventory import targets_of_inventory
from laoka.files import why_unread, write_atomic
from laoka.fleet.inventory import InventoryUnread
from laoka.fleet.targets import InventoryTarget
from laoka.host.collect import SshTarget, ssh_argv
from laoka.process import NOT_FOUND_STATUS, Completed, run

STATE_FILE = "/run/laoka/watchdog.json"
ASK = "PATH=$PATH:/usr/local/bin exec laoka watchdog status --json"
ASK_DEADLINE_S = 45.0
DRILL_DEADLINE_S = 20.0
ALERT_TEST = "alert-test.json"
"""In the watchdog's folder: when alerts were last tested, and what came of it."""


@click.group()
def command() -> None:
    """What the watchdog of a host sees, and whether its alerts arrive.

    What it may do by itself is the inventory's: watchdog_recovery.
    """


@command.command()
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option("-i", "key_file", type=click.Path(exists=True, dir_okay=False), help="SSH key file.")
@click.option("--jump", metavar="[USER@]HOST[:PORT]", help="SSH host in between.")
@click.option("--json", "as_json", is_flag=True, help="JSON: an object for one host, a list for several.")
@click.option(
    "--state", "file", type=click.Path(path_type=Path), default=STATE_FILE, show_default=True, help="State file to read here."
)
@click.pass_obj
def status(lang: Language, targets: tuple[str, ...], key_file: str | None, jump: str | None, as_json: bool, file: Path) -> int:
    """Cards, sensors, incidents, what the watchdog does next, alerts: of this host, or of others over SSH.

    TARGET is [user@]host[:port] or an inventory. Exit status: 1 something is wrong, unknown or stale; 2 one could not be asked.
    """
    found = _read_there(targets, key_file, jump, lang) if targets else [Told("", _read_here(file, lang))]
    if as_json:
        printed = [told.current or {"target": told.name, "error": told.fault} for told in found]
        click.echo(json.dumps(printed[0] if len(printed) == 1 else printed, ensure_ascii=False))
    for told in found:
        if told.current is None:
            click.echo(told.fault, err=True)
            continue
        if not as_json:
            for line in lines(told.current, lang):
                click.echo(line)
            if told.current["stale"]:
                age = f"{told.current['age_s']:.0f} s" if told.current["age_s"] >= 0 else "?"
                click.echo(text("watchdog.status.stale", lang, file=told.name or file, age=age), err=True)
    if any(told.current is None for told in found):
        return 2
    return 0 if all(told.current and all_well(told.current) and not told.current["stale"] for told in found) else 1


@dataclass(frozen=True)
class Told:
    """What one host told: its state with `stale` and `age_s`; None and a line where it could not be asked."""

    name: str
    current: dict[str, Any] | None = None
    fault: str = ""


def _read_here(file: Path, lang: Language) -> dict[str, Any]:
    """The state in a file, with its age. Errors: click.ClickException."""
    try:
        current = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.ClickException(text("watchdog.status.no_file", lang, file=file, reason=error.strerror)) from None
    except ValueError:
        raise click.ClickException(text("watchdog.status.not_state", lang, file=file, reason="JSON")) from None
    if not isinstance(current, dict) or current.get("schema") != state.SCHEMA:
        raise click.ClickException(text("watchdog.status.not_state", lang, file=file, reason="schema"))
    age_s = time.monotonic() - float(current["written_mono_s"])
    # A monotonic time of another boot can lie ahead of ours.
    return {**current, "stale": not 0 <= age_s <= state.STALE_AFTER_S, "age_s": round(age_s, 1)}


def _read_there(words: Sequence[str], key_file: str | None, jump: str | None, lang: Language) -> list[Told]:
    """The state of each host as its own laoka tells it, asked side by side, in the order given."""
    targets: list[tuple[str, SshTarget | None]] = []
    for word in words:
        if word.endswith(".py"):
            targets += [(target.name, target.ssh) for target in _of_inventory(word)]
        else:
            target = ssh_target(word, key_file, jump)
            targets.append((target.name, target))
    with ThreadPoolExecutor(max_workers=HOSTS_AT_ONCE) as pool:
        return list(pool.map(lambda target: _ask(target[0], target[1], lang), targets))


def _of_inventory(file: str) -> Sequence[InventoryTarget]:
    try:
        return targets_of_inventory(file)
    except InventoryUnread as error:
        raise click.ClickException(str(error)) from None


def _ask(name: str, target: SshTarget | None, lang: Language) -> Told:
    argv = ssh_argv(target, ASK) if target is not None else ("sh", "-c", ASK)
    return answer_of(name, run(argv, deadline_s=ASK_DEADLINE_S), lang)


def answer_of(name: str, done: Completed, lang: Language) -> Told:
    """What a host's `laoka watchdog status --json` said."""
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if isinstance(found, dict) and found.get("schema") == state.SCHEMA and "stale" in found:
        return Told(name, {**found, "target": name})
    if found is not None:
        return Told(name, fault=text("watchdog.status.other_version", lang, target=name))
    if done.status == NOT_FOUND_STATUS:
        return Told(name, fault=text("watchdog.status.not_installed", lang, target=name))
    reason = "no answer before the deadline" if done.timed_out else done.last_line()
    return Told(name, fault=text("watchdog.status.not_asked", lang, target=name, reason=reason))


def all_well(current: dict[str, Any]) -> bool:
    """Whether nothing is wrong and nothing is unknown."""
    verdicts = {sensor["verdict"] for sensor in current["sensors"]}
    return (
        not current["incidents"]["open"]
        and verdicts <= {"ok", "off"}
        and all(card["state"] == "present" for card in current["gpus"]["cards"])
        and bool(current["alerts"]["channels"])
        and not current["alerts"]["failing"]
    )


def lines(current: dict[str, Any], lang: Language) -> list[str]:
    """The state as a person reads it."""
    gpus, found, alerts = current["gpus"], current["incidents"], current["alerts"]
    marks = f"{text('watchdog.simulated', lang)} " if current["simulated"] else ""
    head = {"marks": marks, "host": current["host"], "seen": gpus["seen"], "expected": gpus["expected"]}
    shown = [text("watchdog.status.head", lang, **head, open=len(found["open"]))]
    shown += [text("watchdog.status.simulated", lang)] if current["simulated"] else []
    recovery = current["recovery"]
    reboots = text("watchdog.status.reboots", lang, count=recovery["reboots_per_day"])
    reboots = reboots if recovery["reboot"] else text("watchdog.status.no_reboots", lang)
    shown.append("  " + text("watchdog.status.recovery", lang, policy=recovery["policy"], reboots=reboots))
    if recovery["given_up"]:
        shown.append("  " + text("watchdog.status.given_up", lang, cards=", ".join(recovery["given_up"])))
    shown += [text("watchdog.status.drill", lang)] if current["drill_allowed"] else []
    for card in gpus["cards"]:
        shown.append(f"  {text('watchdog.card.state.' + card['state'], lang):<14}{card['card']}{_figures(card)}")
    if gpus["unexpected"]:
        shown.append("  " + text("watchdog.status.unexpected", lang, cards=", ".join(gpus["unexpected"])))
    for sensor in current["sensors"]:
        verdict = text(f"watchdog.verdict.{sensor['verdict']}", lang)
        age = "" if sensor["verdict"] == "off" else f"{sensor['age_s']:.0f} s"
        shown.append(f"  {sensor['name']:<12}{verdict:<9}{age:>6}  {sensor['detail']}")
    for incident in found["open"]:
        shown.append(f"  ! {_incident(incident, lang)}")
        shown.append("    " + text("watchdog.status.next", lang, next=incident["next"]))
        shown.append("    " + text("watchdog.status.doing", lang, doing=incident["doing"]))
        shown += [f"      {line}" for line in incident["tried"]]
    if found["recent"]:
        shown.append("  " + text("watchdog.status.recent", lang))
        shown += [f"    {_incident(incident, lang)}" for incident in found["recent"]]
    if alerts["channels"]:
        shown.append("  " + text("watchdog.status.alerts", lang, **{key: alerts[key] for key in _COUNTS}))
    else:
        shown.append("  " + text("watchdog.status.no_channel", lang, source=alerts["source"]))
    for channel, tries in alerts["failing"].items():
        shown.append("  " + text("watchdog.status.failing", lang, channel=channel, tries=tries))
    return [*shown, *(f"  - {note}" for note in current["notes"])]


_COUNTS = ("channels", "delivered", "waiting", "held")


def _figures(card: dict[str, Any]) -> str:
    parts = [card["link"]] if card["link"] else []
    parts += [f"core {card['core_c']} C"] if card["core_c"] is not None else []
    parts += [f"HBM {card['memory_c']} C"] if card["memory_c"] is not None else []
    parts += [f"limit {card['power_limit_w']:g} W"] if card["power_limit_w"] is not None else []
    return f"  ({', '.join(parts)})" if parts else ""


def _incident(incident: dict[str, Any], lang: Language) -> str:
    what = text(f"watchdog.class.{incident['class']}", lang)
    xid = f" (Xid {incident['xid']})" if incident["xid"] is not None else ""
    drill = f"{text('watchdog.drill', lang)} " if incident["drill"] else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident["opened_unix_s"]))
    return f"{when} {drill}{what}{xid}: {incident['card']} [{incident['id']}]"


def _config(file: Path, lang: Language) -> Config:
    """The settings of this host's watchdog. Errors: click.ClickException."""
    if not file.exists():
        raise click.ClickException(text("watchdog.not_here", lang, file=file))
    try:
        return load_config(file)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


@command.command(name="test-alert")
@click.option(
    "--config", "file", type=click.Path(path_type=Path), default=DEFAULT_PATH, show_default=True, help="The watchdog's settings."
)
@click.pass_obj
def test_alert(lang: Language, file: Path) -> int:
    """Send one message marked TEST to every configured channel. Exit status 1 when any of them failed."""
    config = _config(file, lang)
    try:
        urls, source = outbox.read_urls(config.alert_urls_file)
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{config.alert_urls_file}: {why_unread(error)}") from None
    if not urls:
        click.echo(text("watchdog.test.none", lang, source=source), err=True)
        return 1
    title, body = test_message(config)
    delivered = 0
    for url in urls:
        channel = outbox.channel_name(url)
        if not channels.is_address(url):
            outcome = "not_an_address"
        else:
            outcome = "delivered" if channels.send(url, title, body, "test") else "failed"
        delivered += outcome == "delivered"
        click.echo(text(f"watchdog.test.{outcome}", lang, channel=channel))
    # When alerts were last proven is what an audit asks for.
    record = {"unix_s": time.time(), "delivered": delivered, "failed": len(urls) - delivered}
    path = Path(config.state_dir) / ALERT_TEST
    try:
        write_atomic(path, json.dumps(record) + "\n")
    except OSError as error:
        click.echo(f"{path}: {error.strerror}", err=True)
    return 0 if delivered == len(urls) else 1


@command.command(name="drill")
@click.argument("fault", type=click.Choice(drill.FAULTS))
@click.option(
    "--config", "file", type=click.Path(path_type=Path), default=DEFAULT_PATH, show_default=True, help="The watchdog's settings."
)
@click.pass_obj
def drill_command(lang: Language, fault: drill.Fault, file: Path) -> int:
    """Rehearse a dropped card, a hung NVML, heat or a dead engine: a marked record, an incident, an alert; nothing else happens.

    Needs drill = true in the watchdog's settings. Exit status 1 when no incident came of it or an alert is not delivered.
    """
    config = _config(file, lang)
    if not config.drill:
        raise click.ClickException(text("watchdog.drill.not_allowed", lang, file=file))
    if not config.gpu:
        raise click.ClickException(text("watchdog.drill.no_card", lang, file=file))
    before = _read_state(config)
    if before is None:
        raise click.ClickException(text("watchdog.status.no_file", lang, file=config.state_file, reason="?"))
    if _drills(before):
        raise click.ClickException(text("watchdog.drill.running", lang))
    try:
        drill.write_record(config.kernel_log, drill.record_text(fault, config))
    except OSError as error:
        raise click.ClickException(f"{config.kernel_log}: {error.strerror}") from None
    click.echo(text("watchdog.drill.written", lang, log=config.kernel_log, bdf=config.gpu[0].bdf, fault=fault), err=True)
    end_s = time.monotonic() + DRILL_DEADLINE_S
    found: list[str] = []
    while time.monotonic() < end_s:
        time.sleep(0.2)
        current = _read_state(config) or before
        found = found or _drills(current)
        if found and not current["alerts"]["waiting"] and current["alerts"]["delivered"] > before["alerts"]["delivered"]:
            click.echo(text("watchdog.drill.delivered", lang, id=found[0], channels=current["alerts"]["channels"]))
            return 0
    outcome, name = ("not_delivered", found[0]) if found else ("not_seen", "")
    click.echo(text(f"watchdog.drill.{outcome}", lang, id=name, seconds=f"{DRILL_DEADLINE_S:g}"), err=True)
    return 1


def _read_state(config: Config) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(Path(config.state_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _drills(current: dict[str, Any]) -> list[str]:
    """Open incidents that are a drill."""
    return [incident["id"] for incident in current["incidents"]["open"] if incident["drill"]]


def test_message(config: Config) -> tuple[str, str]:
    """Title and body of the test message, in the language of the host's alerts."""
    lang = config.lang
    body = text("watchdog.body.test", lang, host=config.host)
    if config.simulated:
        body = f"{text('watchdog.body.simulated', lang)}\n\n{body}"
    return text("watchdog.title.test", lang, marks=wording.marks(config), host=config.host), body
