"""`laoka diagnose`: why it is broken, from logs, captures and hosts; root cause first, with its evidence and the next step."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import click

from laoka import checks
from laoka.catalog.messages import COLON, SEMICOLON, Language, text
from laoka.checks.finding import Finding
from laoka.cli.check import LOCAL, ssh_target
from laoka.cli.inventory import targets_of_inventory
from laoka.cli.main import EXIT_FINDINGS, EXIT_FINE, said
from laoka.diagnose.chain import Diagnosis, Found, diagnose
from laoka.diagnose.scan import Readable, Scan, scan
from laoka.fleet.inventory import InventoryUnread
from laoka.host import collect
from laoka.host.bundle import is_bundle
from laoka.host.collect import CouldNotCollect, SshTarget, ssh_argv
from laoka.host.report import HostReport
from laoka.process import run

LOG_LINES = 50_000
JOURNAL_BYTES = 64 * 1024 * 1024
JOURNAL_DEADLINE_S = 90
PROBE_MARK = b"@laoka-probe "
# The model server, its guard and the kernel in one order of time.
JOURNAL = (
    "ids=$(systemctl list-units --all --plain --no-legend 'qwen-serve@*.service' "
    "| sed 's/[.]service.*//; s/^/SYSLOG_IDENTIFIER=/')\n"
    "journalctl --no-pager -q -o short-iso -n {lines} SYSLOG_IDENTIFIER=qwen-serve $ids + _TRANSPORT=kernel"
)
PROGRESS_S = 2.0
ESCAPE = 0x1B
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
"""How a text begins that is not UTF-8, and the codec that reads it, mark and all."""
MOST_STRANGE = 0.05
"""Of random bytes a tenth are no text's."""


def journal_of(ssh: SshTarget | None, name: str) -> bytes:
    """The journal of the served model and of the kernel. Errors: CouldNotCollect."""
    script = JOURNAL.format(lines=LOG_LINES)
    argv = ssh_argv(ssh) if ssh else ("sh", "-s")
    done = run(argv, stdin=script, deadline_s=JOURNAL_DEADLINE_S, max_output_bytes=JOURNAL_BYTES)
    if not done.ok and not done.stdout:
        raise CouldNotCollect(f"{name}: its journal could not be read: {done.last_line()}")
    return done.stdout.encode()


def read_log(name: str, lang: Language) -> tuple[Scan | None, HostReport | None]:
    """A log file, "-" for standard input; a capture instead gives its report. Errors: click.ClickException."""
    try:
        with sys.stdin.buffer if name == "-" else Path(name).open("rb") as stream:
            head = stream.read(4096)
            if not head:
                raise click.ClickException(text("diagnose.empty", lang, name=name))
            if name != "-" and (PROBE_MARK in head or (is_bundle(head) and is_capture(name))):
                return None, collect.from_file(name)
            if PROBE_MARK in head:
                raise click.ClickException(text("diagnose.no_text", lang, name=name))
            whole: Readable = _Joined(head, stream)
            unpacked = _Unpacked(whole) if is_bundle(head) else None
            if unpacked is not None:
                head = unpacked.read(4096)
                whole = _Joined(head, unpacked)
                if is_tar(head):
                    raise click.ClickException(text("diagnose.no_text", lang, name=name))
            encoding = next((words for mark, words in MARKS.items() if head.startswith(mark)), None)
            if encoding:
                whole = _Recoded(whole, encoding)
            elif not is_text(head):
                raise click.ClickException(text("diagnose.no_text", lang, name=name))
            found = scan(whole, name, _progress(name, lang))
            if unpacked is not None and unpacked.cut:
                if not found.hits and found.first_error is None:
                    raise click.ClickException(text("diagnose.cut_nothing", lang, name=name))
                click.echo(text("diagnose.cut", lang, name=name), err=True)
            return found, None
    except CouldNotCollect as error:
        raise click.ClickException(str(error)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise click.ClickException(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def is_capture(name: str) -> bool:
    """Whether a packed file is a capture, and not a log that logrotate packed."""
    with gzip.open(name, "rb") as stream, contextlib.suppress(OSError, EOFError, zlib.error):
        return is_tar(stream.read(512))
    return False


def is_tar(head: bytes) -> bool:
    """Whether bytes are the beginning of a tar archive."""
    return head[257:262] == b"ustar"


def is_text(head: bytes) -> bool:
    """Whether a file begins like a log: hardly a byte in it is one that no text has. A log that was cut off may have some."""
    strange = sum(byte < 9 or (14 <= byte < 32 and byte != ESCAPE) for byte in head)
    return strange <= len(head) * MOST_STRANGE


class _Unpacked:
    """A packed stream, unpacked as far as it goes: a log that was cut off while it was packed or copied is still a log.

    Errors: EOFError, zlib.error, OSError when not a byte of it can be unpacked.
    """

    def __init__(self, packed: Readable) -> None:
        self._stream = gzip.GzipFile(fileobj=packed)  # type: ignore[call-overload]  # it only reads
        self._begun = self.cut = False

    def read(self, size: int, /) -> bytes:
        pieces: list[bytes] = []
        while size > 0 and not self.cut:
            try:
                piece = self._stream.read1(size)
            except (EOFError, zlib.error, OSError):
                if not self._begun:
                    raise
                self.cut = True
                break
            if not piece:
                break
            self._begun = True
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)


class _Recoded:
    """UTF-16, as PowerShell's `>` writes it, as UTF-8."""

    def __init__(self, stream: Readable, encoding: str) -> None:
        self._stream, self._decoder = stream, codecs.getincrementaldecoder(encoding)(errors="replace")

    def read(self, size: int, /) -> bytes:
        while piece := self._stream.read(size):
            if found := self._decoder.decode(piece):
                return found.encode("utf-8", errors="replace")
        return b""


class _Joined:
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int, /) -> bytes:
        head, self._head = self._head[:size], self._head[size:]
        return head + self._rest.read(size - len(head)) if size > len(head) else head


def _progress(name: str, lang: Language) -> Callable[[int], None]:
    """A line every few seconds where somebody watches."""
    began_s = told_s = time.monotonic()
    watched = sys.stderr.isatty()

    def tell(count: int) -> None:
        nonlocal told_s
        if watched and time.monotonic() - max(told_s, began_s) > PROGRESS_S:
            told_s = time.monotonic()
            click.echo(text("diagnose.reading", lang, name=name, read_mb=count / 1e6), err=True)

    return tell


def read_host(ssh: SshTarget | None, name: str, lang: Language) -> tuple[Scan, HostReport]:
    """A host: its journal and its report. Errors: CouldNotCollect."""
    report = collect.from_this_machine() if ssh is None else collect.from_ssh(ssh)
    return scan(io.BytesIO(journal_of(ssh, name)), name), report


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET|LOG...")
@click.option("--host", "host_name", metavar="NAME", help="Of the inventory given as TARGET, this host only.")
@click.option("-i", "key_file", type=click.Path(exists=True, dir_okay=False), help="SSH key file.")
@click.option("--jump", metavar="[USER@]HOST[:PORT]", help="SSH host in between.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def command(
    lang: Language, /, targets: tuple[str, ...], host_name: str | None, key_file: str | None, jump: str | None, as_json: bool
) -> int:
    """Why it is broken: root cause, the line that shows it, and what to do.

    \b
    laoka diagnose vllm.log                   a log of any size; - is standard input
    laoka diagnose ops@10.0.0.7               the journal of its model server and kernel, and its hardware
    laoka diagnose inventories/lab.py --host x99-tower
    laoka diagnose capture.tar.gz vllm.log    both together

    Exit status: 0 nothing wrong, 1 something found, 2 could not read.
    """
    scans: list[Scan] = []
    findings: list[Finding] = []
    hosts: list[str] = []
    try:
        for target in targets:
            for one, report in _read(target, host_name, key_file, jump, lang):
                if one is not None:
                    scans.append(one)
                if report is not None:
                    hosts.append(target)
                    findings += checks.run(report)
    except (CouldNotCollect, InventoryUnread) as error:
        raise click.ClickException(str(error)) from None
    found = diagnose(scans, findings, ", ".join(hosts))
    if as_json:
        click.echo(json.dumps(found.table(lang), ensure_ascii=False, indent=1))
    else:
        show(found, lang)
    return EXIT_FINDINGS if found.anything else EXIT_FINE


def _read(
    target: str, host_name: str | None, key_file: str | None, jump: str | None, lang: Language
) -> list[tuple[Scan | None, HostReport | None]]:
    if target.endswith(".py"):
        there = targets_of_inventory(target)
        listed = [item for item in there if host_name in (None, item.name)]
        if not listed:
            hosts = ", ".join(item.name for item in there)
            raise click.BadParameter(said("host_none", word=host_name, inventory=target, hosts=hosts))
        return [read_host(item.ssh, item.name, lang) for item in listed]
    if target == LOCAL:
        return [read_host(None, LOCAL, lang)]
    if target == "-" or Path(target).exists():
        return [read_log(target, lang)]
    if "/" in target or target.endswith((".log", ".txt", ".gz")):
        raise click.ClickException(said("no_file", word=target))
    return [read_host(ssh_target(target, key_file, jump), target, lang)]


def show(found: Diagnosis, lang: Language) -> None:
    """Print a diagnosis for a person."""
    if found.root is not None:
        _show_found(found.root, text("diagnose.root", lang), lang)
    elif found.first_error is not None:
        error = found.first_error
        click.echo(text("diagnose.unknown", lang, source=found.first_error_source, line_number=error.line_number))
        click.echo(f"  {error.text}")
        click.echo(f"  -> {text('diagnose.unknown_next', lang)}")
    else:
        click.echo(text("diagnose.fine", lang, lines=f"{sum(scan.lines for scan in found.scans):,}"))
    if found.also:
        click.echo(text("diagnose.also", lang))
        for item in found.also:
            title, _, fix = item.words[lang]
            note = f" ({text('diagnose.benign', lang)})" if item.benign else f" -> {fix}" if item.role == "cause" else ""
            click.echo(f"  {_place(item)}{title}{note}")
    click.echo(text("diagnose.steps", lang))
    for step in found.walked:
        words = [*step.found, *(text(f"diagnose.{key}", lang) for key in step.ruled_out)]
        click.echo(f"  {text(f'diagnose.step_{step.step}', lang)}{COLON[lang]}{SEMICOLON[lang].join(words) or '-'}")


def _show_found(found: Found, head: str, lang: Language) -> None:
    title, cause, fix = found.words[lang]
    click.echo(f"{head}{COLON[lang]}{title} [{found.id}]")
    click.echo(f"  {text('diagnose.evidence', lang)}{COLON[lang]}{_place(found)}{found.evidence}")
    click.echo(f"  {text('diagnose.cause', lang)}{COLON[lang]}{cause}")
    click.echo(f"  -> {text('diagnose.fix', lang)}{COLON[lang]}{fix}")


def _place(found: Found) -> str:
    return f"{found.source}: " if found.line_number is None else f"{found.source}:{found.line_number}: "
