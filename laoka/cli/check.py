"""`laoka check`: is this host fit for the cards, and if not, why and what to do."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from laoka import checks
from laoka.catalog.messages import Language, text
from laoka.catalog.translations import error_text
from laoka.checks.finding import SEVERITIES, Finding, label
from laoka.checks.policy import Accepted, PolicyError, apply, parse_policy
from laoka.checks.result import HostResult, as_html, as_json, as_junit, by_area
from laoka.cli.inventory import targets_of_inventory
from laoka.cli.main import EXIT_COULD_NOT_RUN, EXIT_FINDINGS, EXIT_FINE, said
from laoka.files import write_atomic
from laoka.fleet.inventory import InventoryUnread
from laoka.host import collect
from laoka.host.bundle import CAPTURE_SUFFIXES
from laoka.host.collect import CouldNotCollect, SshTarget
from laoka.host.report import FILE_KINDS, HostReport

if TYPE_CHECKING:
    from rich.console import Console

HOSTS_AT_ONCE = 10
LOCAL = "@local"

Target = tuple[str, Callable[[], HostReport]]


def check_many(
    targets: Sequence[Target],
    *,
    expected_gpus: int | Mapping[str, int] | None = None,
    only: Iterable[str] = (),
    policy: tuple[Accepted, ...] = (),
    today: datetime.date | None = None,
    on_done: Callable[[HostResult], None] = lambda result: None,
) -> tuple[HostResult, ...]:
    """Read and check hosts side by side, in the order given; a host that can't be read has its `error` set.

    Arguments: `targets` (name, function that gives the report or raises CouldNotCollect); `expected_gpus` one number for
    all hosts or one per host name; `on_done` is called as each host is finished (for progress).
    """
    day, chosen = today or datetime.date.today(), tuple(only)

    def one(target: Target) -> HostResult:
        name, read = target
        try:
            report = read()
        except CouldNotCollect as error:
            result = HostResult(name, None, (), str(error))
        else:
            wanted = expected_gpus.get(name) if isinstance(expected_gpus, Mapping) else expected_gpus
            findings = apply(policy, checks.run(report, expected_gpus=wanted, only=chosen), name, day)
            result = HostResult(name, report, findings)
        on_done(result)
        return result

    with ThreadPoolExecutor(max_workers=HOSTS_AT_ONCE) as pool:
        return tuple(pool.map(one, targets))


def exit_status(results: Sequence[HostResult]) -> int:
    """2 when a host could not be read, 1 when one has something to look at, else 0."""
    if any(result.error for result in results):
        return EXIT_COULD_NOT_RUN
    fine = all(result.verdict in ("ok", "info") for result in results)
    return EXIT_FINE if fine else EXIT_FINDINGS


def ssh_target(words: str, key_file: str | None, jump: str | None) -> SshTarget:
    """`[user@]host[:port]` as a target; `[v6]:port` for an IPv6 address. Errors: click.BadParameter."""
    user, _, rest = words.rpartition("@")
    host, port = rest, "22"
    if rest.startswith("["):
        host, _, tail = rest[1:].partition("]")
        port = tail.removeprefix(":") or "22"
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    if not host or host.startswith("-") or user.startswith("-") or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(said("not_a_host", word=words))
    return SshTarget(host, int(port), user or None, key_file, None, jump)


def capture_file(words: str) -> Path | None:
    """The file that a word names; None where it names a host. Errors: click.BadParameter for a file that is not there."""
    path = Path(words)
    if path.is_file():
        return path
    if "/" in words or words in (".", "..") or words.endswith(CAPTURE_SUFFIXES):
        raise click.BadParameter(said("is_folder" if path.is_dir() else "no_file", word=words))
    return None


def find_targets(words: Sequence[str], key_file: str | None, jump: str | None) -> tuple[list[Target], dict[str, int]]:
    """Targets of the command line, and how many cards an inventory expects by host. Errors: click.ClickException."""
    found: list[Target] = []
    expected: dict[str, int] = {}
    for word in words:
        if word == LOCAL:
            found.append((LOCAL, collect.from_this_machine))
        elif word.endswith(".py"):
            try:
                targets = targets_of_inventory(word)
            except InventoryUnread as error:
                raise click.ClickException(str(error)) from None
            found += [(target.name, target.read) for target in targets]
            expected |= {target.name: target.expected_gpus for target in targets if target.expected_gpus is not None}
        elif (path := capture_file(word)) is not None:
            found.append((word, lambda path=path: collect.from_file(path)))  # type: ignore[misc]
        else:
            target = ssh_target(word, key_file, jump)
            found.append((target.name, lambda target=target: collect.from_ssh(target)))  # type: ignore[misc]
    return found, expected


def report_of_files(pairs: Sequence[str]) -> HostReport:
    """A report of `kind=FILE` pairs. Errors: click.BadParameter for an unknown kind or a file that can't be read."""
    texts: dict[str, str] = {}
    for pair in pairs:
        kind, equals, name = pair.partition("=")
        if not equals or kind not in FILE_KINDS:
            raise click.BadParameter(said("file_kind", word=pair, kinds=", ".join(sorted(FILE_KINDS))))
        try:
            texts[kind] = Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise click.BadParameter(said("file_unread", word=pair, why=error.strerror)) from None
    return HostReport.from_files(texts)


def explain(check_id: str, lang: Language) -> str:
    """What a check looks at and where its facts come from. Errors: click.BadParameter for an unknown id."""
    known = checks.CHECKS.get(check_id)
    if known is None:
        close = [name for name in checks.CHECKS if check_id in name]
        hint = ", ".join(close[:8]) if close else said("check_list")
        raise click.BadParameter(said("no_check", word=check_id, hint=hint))
    lines = [f"{known.id}: {label(known.id, lang)}", "", (known.function.__doc__ or "").strip()]
    if known.gate:
        lines += ["", text("checks.is-gate", lang)]
    if known.source:
        lines += ["", f"{text('checks.source', lang)}: {known.source}"]
    return "\n".join(lines)


MARKS = {"ok": "✓", "info": "i", "warn": "!", "unknown": "?", "fail": "✗"}
STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "unknown": "magenta", "fail": "bold red"}


def show(result: HostResult, lang: Language, console: Console, *, everything: bool) -> None:
    """Print one host for people: areas worst first; what could not be read is told once per reason."""
    from rich.padding import Padding
    from rich.text import Text

    console.print()
    head = Text.assemble((result.host, "bold"), "  ", (result.verdict.upper(), STYLES[result.verdict]))
    if result.report is not None and result.report.probe.simulated:
        head.append("  " + text("checks.platform.simulated.simulated", lang), style="yellow")
    console.print(head)
    if result.error:
        console.print(Padding(Text(error_text(result.error, lang), style="red"), (0, 0, 0, 2)))
        return
    for area, findings in by_area(result.findings):
        shown = [f for f in findings if everything or (f.severity not in ("ok", "unknown") or f.case not in ("ok", "unread"))]
        fine = len([f for f in findings if f.severity == "ok"])
        if not shown and not everything:
            continue
        title = Text(text(f"checks.area.{area}", lang), style="bold")
        title.append(f"  {MARKS['ok']} {fine}" if fine else "", style="dim")
        console.print(Padding(title, (1, 0, 0, 0)))
        for finding in shown:
            _show_finding(finding, lang, console)
    if not everything:
        _show_unread(result.findings, lang, console)
    counts = [f"{sum(f.severity == s for f in result.findings)} {text(f'checks.count.{s}', lang)}" for s in reversed(SEVERITIES)]
    console.print(Padding(Text(", ".join(counts), style="dim"), (1, 0, 0, 0)))


def _show_finding(finding: Finding, lang: Language, console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    style = "dim" if finding.accepted else STYLES[finding.severity]
    head = Text.assemble((f"{MARKS[finding.severity]} ", style), finding.title(lang), (f"  {finding.id}", "dim"))
    console.print(Padding(head, (0, 0, 0, 2)))
    for line in finding.evidence if finding.severity != "ok" else finding.evidence[:1]:
        console.print(Padding(Text(line, style="dim"), (0, 0, 0, 6)))
    if finding.accepted:
        words = f"{text('checks.accepted', lang)}: {finding.accepted}"
        console.print(Padding(Text(words, style="dim"), (0, 0, 0, 6)))
        return
    for words, mark in ((finding.why(lang), ""), (finding.next(lang), "→ ")):
        if words:
            console.print(Padding(Text(mark + words), (0, 0, 0, 4 if mark else 6)))


def _show_unread(findings: Iterable[Finding], lang: Language, console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.case == "unread" and not finding.accepted:
            ids = reasons.setdefault(dict(finding.values).get("reason", ""), [])
            if finding.id not in ids:
                ids.append(finding.id)
    if not reasons:
        return
    console.print(Padding(Text(text("checks.could-not-read", lang), style="bold"), (1, 0, 0, 0)))
    for reason, ids in reasons.items():
        line = Text.assemble((f"{MARKS['unknown']} ", STYLES["unknown"]), f"{error_text(reason, lang)}: ", (", ".join(ids), "dim"))
        console.print(Padding(line, (0, 0, 0, 2)))


@click.command()
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option("--file", "files", multiple=True, metavar="KIND=FILE", help="Judge single files of machine output (repeat).")
@click.option("-i", "key_file", type=click.Path(exists=True, dir_okay=False), help="SSH key file.")
@click.option("--jump", metavar="[USER@]HOST[:PORT]", help="SSH host in between.")
@click.option("--expect", type=click.IntRange(min=0), metavar="N", help="How many cards each host should have.")
@click.option("--only", multiple=True, metavar="AREA|ID", help="Only this area or check (repeat).")
@click.option("--all", "everything", is_flag=True, help="Show what is fine too.")
@click.option(
    "--policy",
    type=click.Path(exists=True, dir_okay=False),
    help="Findings that are accepted: TOML rows [[accept]] with id, host, reason, until.",
)
@click.option("--json", "as_json_", is_flag=True, help="Print JSON: an object for one host, a list for several.")
@click.option("--junit", type=click.Path(dir_okay=False), metavar="FILE", help="Write a JUnit file too.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write an HTML page too.")
@click.option("--explain", "explain_id", metavar="ID", help="Say what a check looks at, and end.")
@click.option("--list", "list_", is_flag=True, help="List all checks, and end.")
@click.pass_obj
def command(
    lang: Language,
    targets: tuple[str, ...],
    files: tuple[str, ...],
    key_file: str | None,
    jump: str | None,
    expect: int | None,
    only: tuple[str, ...],
    everything: bool,
    policy: str | None,
    as_json_: bool,
    junit: str | None,
    html: str | None,
    explain_id: str | None,
    list_: bool,
) -> int:
    """Check hosts without changing them: firmware, cards, links, power, driver, kernel, system.

    TARGET is @local, [user@]host[:port], a capture file, or an inventory. Exit status: 0 fine, 1 findings, 2 could not run.
    """
    if explain_id:
        click.echo(explain(explain_id, lang))
        return EXIT_FINE
    if list_:
        for known in checks.CHECKS.values():
            click.echo(f"{known.id:32}{label(known.id, lang)}")
        return EXIT_FINE
    if bool(targets) == bool(files):
        raise click.UsageError(said("name_target"))
    unknown = [word for word in only if word not in checks.AREAS and word not in checks.CHECKS]
    if unknown:
        raise click.BadParameter(said("only_unknown", word=unknown[0], areas=", ".join(checks.AREAS)))
    try:
        accepted = parse_policy(Path(policy).read_text(encoding="utf-8"), policy, checks.CHECKS) if policy else ()
    except PolicyError as error:
        raise click.ClickException(str(error)) from None
    if files:
        report = report_of_files(files)
        chosen: list[Target] = [("files", lambda: report)]
        expected: dict[str, int] = {}
    else:
        chosen, expected = find_targets(targets, key_file, jump)
    progress = sys.stderr.isatty() and len(chosen) > 1
    results = check_many(
        chosen,
        expected_gpus=expected if expect is None else expect,
        only=only,
        policy=accepted,
        on_done=lambda result: click.echo(f"{result.host}: {result.verdict}", err=True) if progress else None,
    )
    for result in results:
        if result.error:
            click.echo(f"laoka check: {error_text(result.error, lang)}", err=True)
    if as_json_:
        printed = [as_json(result, lang) for result in results]
        click.echo(json.dumps(printed[0] if len(printed) == 1 else printed, ensure_ascii=False, indent=2))
    else:
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            raise click.ClickException(said("report_needs", package="rich")) from None
        console = Console(highlight=False)
        for result in results:
            show(result, lang, console, everything=everything)
    try:
        if junit:
            write_atomic(junit, as_junit(results, lang))
        if html:
            write_atomic(html, as_html(results, lang))
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    except ModuleNotFoundError as error:
        raise click.ClickException(said("output_needs", package=error.name)) from None
    return exit_status(results)
