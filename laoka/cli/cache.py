"""`laoka cache`: what the prefix cache of a server saves, what it could save, and what to move in the prompts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from laoka.catalog.messages import Language, text
from laoka.cli.bench import Place, Wanted, console, place_of, place_options
from laoka.cli.main import EXIT_FINDINGS, EXIT_FINE
from laoka.serving.bench.client import BenchError
from laoka.serving.bench.engine_metrics import Snapshot, Span, between
from laoka.serving.prefix_insight import Insight, analyse
from laoka.serving.prefix_log import Noted, parse_line

LOG_ON_HOST = "/var/lib/qwen-guard/prefixes.jsonl"
DEFAULT_BLOCK = 16
READ_DEADLINE_S = 60


@click.group(cls=Wanted)
def command() -> None:
    """What the prefix cache of a server saves, and what it could.

    \b
    laoka cache http://127.0.0.1:8000                         hit rate since the start
    laoka cache http://127.0.0.1:8000 --for 600 --every 30    and over time
    laoka cache http://10.0.0.7:8080 --host ops@10.0.0.7      and what the guard noted: shared beginnings, what to reorder
    laoka cache prompts prefixes.jsonl                        the same from a file

    The guard (qwen-guard behind the gateway) notes keyed hashes of token blocks, never text, and only with
    `gateway_prefix_log: True` in the inventory. Exit status: 0 fine, 1 prompts could be ordered better, 2 could not read.
    """


@command.command("run")
@place_options
@click.option(
    "--for", "for_s", type=click.FloatRange(0, 86400), default=0.0, metavar="S", help="Watch for so many seconds [0: ask once]."
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def run_command(lang: Language, /, for_s: float, every_s: float, as_json: bool, **place: Any) -> int:
    """Hit rate of the server at URL, now and over time; with --host what the guard noted there, too."""
    here = place_of(**place)
    last, spans = asyncio.run(_watch(here, for_s, every_s))
    insight = None
    if here.host is not None:
        done = here.host.sh(f"cat {LOG_ON_HOST}.1 {LOG_ON_HOST} 2>/dev/null; true", READ_DEADLINE_S)
        insight = analyse(_parse(done.stdout.splitlines()), last.block_size or DEFAULT_BLOCK)
    return _deliver(last, spans, insight, as_json=as_json, lang=lang)


@command.command("prompts")
@click.argument("log", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--block",
    type=click.IntRange(1, 65536),
    default=DEFAULT_BLOCK,
    show_default=True,
    help="Tokens of one block of the engine's cache.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def prompts_command(lang: Language, /, log: str, block: int, as_json: bool) -> int:
    """Shared beginnings and what to reorder, out of a file that the guard wrote."""
    with Path(log).open(encoding="utf-8", errors="replace") as stream:
        lines = [line for line in stream if line.strip()]
    noted = _parse(lines)
    if lines and not noted:
        raise click.ClickException(text("cache.not_noted", lang, name=log))
    insight = analyse(noted, block)
    return _deliver(None, (), insight, as_json=as_json, lang=lang)


def _parse(lines: Any) -> list[Noted]:
    return [found for line in lines if (found := parse_line(line)) is not None]


async def _watch(here: Place, for_s: float, every_s: float) -> tuple[Snapshot, list[tuple[float, Span]]]:
    """The last snapshot, and what happened in each interval with its end in seconds since the beginning. Errors: BenchError."""
    async with here.client() as client:
        last = await client.snapshot()
        if last is None:
            raise BenchError(f"{here.target.root}: /metrics can't be read from here: name the server's --host, or --metrics-url")
        began_s, spans = time.monotonic(), []
        while (left_s := for_s - (time.monotonic() - began_s)) > 0:
            await asyncio.sleep(min(every_s, left_s))
            now = await client.snapshot()
            span = between(last, now)
            if now is not None and span is not None:
                spans.append((time.monotonic() - began_s, span))
                last = now
        return last, spans


def _deliver(
    last: Snapshot | None, spans: Sequence[tuple[float, Span]], insight: Insight | None, *, as_json: bool, lang: Language
) -> int:
    queries, hits = (None, None) if last is None else (last.counters.get("prefix_queries"), last.counters.get("prefix_hits"))
    rate = hits / queries if queries and hits is not None else None
    advice = insight.advice if insight is not None and insight.requests else ()
    if as_json:
        content = {
            "prefix_cache_queries": queries, "prefix_cache_hits": hits, "hit_rate": rate,
            "over_time": [
                {"until_s": round(at_s, 1), "prefix_cache_queries": span.prefix_queries, "prefix_cache_hits": span.prefix_hits,
                 "hit_rate": span.hit_rate, "preemptions": span.preemptions}
                for at_s, span in spans
            ],
            "prompts": None if insight is None else {
                **{key: value for key, value in vars(insight).items() if key != "shared"},
                "reusable_share": insight.reusable_share, "misplaced_share": insight.misplaced_share,
                "shared": [vars(item) for item in insight.shared], "advice": list(advice),
            },
        }  # fmt: skip
        click.echo(json.dumps(content, ensure_ascii=False, indent=1))
    else:
        _show(last, rate, spans, insight, lang)
    return EXIT_FINDINGS if {"reorder", "changes_first"} & set(advice) else EXIT_FINE


def _show(
    last: Snapshot | None, rate: float | None, spans: Sequence[tuple[float, Span]], insight: Insight | None, lang: Language
) -> None:
    from rich.table import Table

    out = console()
    if last is not None:
        queries, hits = last.counters.get("prefix_queries", 0), last.counters.get("prefix_hits", 0)
        key = "cache.rate" if rate is not None else "cache.no_rate"
        percent = "-" if rate is None else f"{100 * rate:.1f}"
        out.print(text(key, lang, hits=f"{hits:,.0f}", queries=f"{queries:,.0f}", percent=percent, block=last.block_size or "?"))
    if spans:
        table = Table(*(text(f"cache.head_{name}", lang) for name in ("until", "queries", "hits", "rate")))
        for at_s, span in spans:
            table.add_row(
                f"{at_s:.0f} s", f"{span.prefix_queries or 0:,.0f}", f"{span.prefix_hits or 0:,.0f}",
                "-" if span.hit_rate is None else f"{100 * span.hit_rate:.1f} %",
            )  # fmt: skip
        out.print(table)
    if insight is None:
        out.print(text("cache.no_host", lang), style="dim")
        return
    if not insight.requests:
        out.print(text("cache.no_log", lang), style="dim")
        return
    out.print(
        text(
            "cache.insight", lang, requests=insight.requests, tokens=f"{insight.tokens:,}", block=insight.block_tokens,
            reusable=f"{insight.reusable_tokens:,}", reusable_percent=f"{100 * insight.reusable_share:.1f}",
            misplaced=f"{insight.misplaced_tokens:,}", misplaced_percent=f"{100 * insight.misplaced_share:.1f}",
        )
    )  # fmt: skip
    if insight.shared:
        table = Table(*(text(f"cache.head_{name}", lang) for name in ("prefix", "tokens", "requests", "saved")))
        for item in insight.shared:
            table.add_row(item.id, f"{item.tokens:,}", f"{item.requests:,}", f"{item.saved_tokens:,}")
        out.print(table)
    at = "-" if insight.parts_at_tokens is None else f"{insight.parts_at_tokens:.0f}"
    for key in insight.advice:
        out.print(f"-> {text(f'cache.{key}', lang, block=insight.block_tokens, at=at)}")
