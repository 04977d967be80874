"""`laoka bench`: how fast a model server is by a fixed recipe, and `laoka bench compare`: whether two runs differ."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from laoka.catalog.messages import Language, text
from laoka.catalog.profiles import Speculative
from laoka.cli.check import LOCAL, ssh_target
from laoka.cli.inventory import targets_of_inventory
from laoka.cli.main import EXIT_FINDINGS, EXIT_FINE, said
from laoka.files import write_atomic
from laoka.fleet.inventory import InventoryUnread
from laoka.host import collect
from laoka.host.collect import CouldNotCollect, SshTarget
from laoka.host.report import HostReport
from laoka.serving.bench import baseline, cards, ramp, tables
from laoka.serving.bench.client import BenchError, Client, ServerFacts, Target
from laoka.serving.bench.compare import Line, NotComparable, compare, notes
from laoka.serving.bench.figures import Goodput
from laoka.serving.bench.host_side import UNIT, CardWatch, HostError, HostSide, told
from laoka.serving.bench.provenance import provenance
from laoka.serving.bench.recipe import Recipe, RecipeError
from laoka.serving.bench.run import Cell, measure, result_of, server_tpot_ms
from laoka.stack.checkpoint import CheckpointError
from laoka.stack.from_report import facts_of
from laoka.stack.lock import NAME as LOCK_NAME
from laoka.stack.message import Message, message
from laoka.stack.models import checkpoint_of
from laoka.stack.request import DEFAULT_MODEL, Request, RequestError
from laoka.stack.resolve import Stack, resolve

if TYPE_CHECKING:
    from rich.console import Console

ENGINE_PORT = 8000
START_DEADLINE_S = 1300
AFTER_RESTART_S = 60.0


class Wanted(click.Group):
    """`laoka bench URL` is `laoka bench run URL`: what is no name of a command is the URL."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (BenchError, RecipeError, HostError, NotComparable, CouldNotCollect, InventoryUnread) as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"{error.filename or ''}: {error.strerror or error}") from None


@click.group(cls=Wanted)
def command() -> None:
    """How fast a model server is, by one fixed recipe, so that two runs compare.

    \b
    laoka bench http://127.0.0.1:8000                      measure a server
    laoka bench http://10.0.0.7:8080 --host ops@10.0.0.7 --api-key-file KEY -o today
    laoka bench compare before.json today.json             ratios, and what is only noise

    Exit status: 0 measured, 1 measured but something spoils the figures (or a figure is worse), 2 could not measure.
    """


@dataclass(frozen=True)
class Place:
    """Where a run happens: the target, the host behind it if it is known, and what may be read there."""

    target: Target
    host: HostSide | None
    port: int
    report: HostReport | None

    def client(self) -> Client:
        """A client whose metrics come from the host's own loopback where there is a host."""
        if self.host is None or self.target.metrics_url is not None:
            return Client(self.target)
        host, port = self.host, self.port

        async def read() -> str:
            return await asyncio.to_thread(host.metrics, port)

        return Client(self.target, read_metrics=read)

    async def facts(self, client: Client, wait_s: float = 0) -> ServerFacts:
        """What the server says of itself; its version from the host's own loopback where a gateway keeps that back.

        `wait_s`: after a restart, so long as a gateway's checks may take to see that the server is there again.
        """
        until_s = time.monotonic() + wait_s
        while True:
            try:
                found = await client.facts()
                break
            except BenchError:
                if time.monotonic() >= until_s:
                    raise
                await asyncio.sleep(1)
        if found.version is None and self.host is not None:
            return replace(found, version=await asyncio.to_thread(self.host.version, self.port))
        return found


def host_side(name: str | None, inventory: str | None, key_file: str | None, jump: str | None) -> HostSide | None:
    """The host of --host. Errors: click.BadParameter, InventoryUnread."""
    if name is None:
        if inventory:
            raise click.UsageError(said("inventory_of_host"))
        return None
    if inventory:
        found = {target.name: target.ssh for target in targets_of_inventory(inventory)}
        if name not in found:
            raise click.BadParameter(said("host_none", word=name, inventory=inventory, hosts=", ".join(found)))
        return HostSide(found[name])
    ssh: SshTarget | None = None if name == LOCAL else ssh_target(name, key_file, jump)
    return HostSide(ssh)


def report_of(host: HostSide | None) -> HostReport | None:
    """The host's report. Errors: CouldNotCollect."""
    if host is None:
        return None
    return collect.from_this_machine() if host.ssh is None else collect.from_ssh(host.ssh)


def read_key(path: str | None) -> str:
    """A key out of a file, never off the command line; the last word of its first line, so a file of `NAME KEY` will do."""
    if path is None:
        return ""
    words = Path(path).read_text(encoding="utf-8-sig", errors="replace").split("\n")[0].split()
    if not words:
        raise click.BadParameter(said("key_empty", word=path))
    if not words[-1].isascii() or not words[-1].isprintable():
        raise click.BadParameter(said("key_not_text", word=path))
    return words[-1]


def place_options(function: Any) -> Any:
    """The options that name a server and its host."""
    for option in reversed((
        click.argument("url"),
        click.option("--model", default="", help="Served model name [the server's first]."),
        click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False), help="File with the API key."),
        click.option("--host", "host_name", metavar="@local|[USER@]HOST[:PORT]",
                     help="The server's host: its cards are sampled, its flags and metrics read."),
        click.option("--inventory", type=click.Path(exists=True, dir_okay=False), help="Inventory that --host is a name of."),
        click.option("-i", "key_file", type=click.Path(exists=True, dir_okay=False), help="SSH key file."),
        click.option("--jump", metavar="[USER@]HOST[:PORT]", help="SSH host in between."),
        click.option("--metrics-url", help="Where /metrics is, when it is not at URL."),
    )):  # fmt: skip
        function = option(function)
    return function


def place_of(
    url: str, model: str, api_key_file: str | None, host_name: str | None, inventory: str | None, key_file: str | None,
    jump: str | None, metrics_url: str | None,
) -> Place:  # fmt: skip
    """The place that the options name. Errors: those of host_side, report_of and read_key."""
    if "://" not in url:
        raise click.BadParameter(said("write_url", word=url))
    host = host_side(host_name, inventory, key_file, jump)
    report = report_of(host)
    port = ENGINE_PORT if host is None else int(host.flags().get("port", ENGINE_PORT))
    return Place(Target(url, model, read_key(api_key_file), metrics_url), host, port, report)


@command.command("run")
@place_options
@click.option("-o", "--output", metavar="NAME", help="Write NAME.json, NAME.csv and NAME.svg.")
@click.option("--json", "as_json", is_flag=True, help="The whole result as JSON instead of tables.")
@click.option(
    "--repeats", type=click.IntRange(1, 50), default=Recipe.repeats, show_default=True, help="Times that each cell is measured."
)
@click.option(
    "--concurrency",
    default=",".join(map(str, Recipe.concurrency)),
    show_default=True,
    metavar="N,N,...",
    help="Requests at once, one cell for each number.",
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1), default=Recipe.prompt_tokens, show_default=True, help="Tokens in, of each request."
)
@click.option(
    "--output-tokens", type=click.IntRange(1), default=Recipe.output_tokens, show_default=True, help="Tokens out, of each request."
)
@click.option(
    "--prefix-cache",
    type=click.Choice(("defeated", "measured")),
    default="defeated",
    show_default=True,
    help="measured: each prompt of the prefill test is sent twice, and the second one counts apart.",
)
@click.option("--limits", metavar="N,N,...", help="Measure at each max-model-len, such as 4096,8192: restarts the unit on --host.")
@click.option("--goodput", metavar="ttft:MS,tpot:MS,e2el:MS", help="Limits in ms that a good request meets.")
@click.option(
    "--lock",
    "lock_file",
    type=click.Path(dir_okay=False),
    default=LOCK_NAME,
    show_default=True,
    help="Lock file whose hash the result notes.",
)
@click.option(
    "--baseline",
    "as_baseline",
    is_flag=True,
    help="Without speculative decoding against with it (DFlash2, MTP): restarts the unit on --host.",
)
@click.option("--variant", "own", multiple=True, metavar="NAME=JSON", help="Another way of speculation for --baseline (repeat).")
@click.option("--checkpoint", metavar="ID", help="Checkpoint of the catalogue whose plan --baseline is held against.")
@click.option("--dry", is_flag=True, help="Say what would be restarted, and end.")
@click.option("--yes", is_flag=True, help="Restart without asking.")
@click.pass_obj
def run_command(
    lang: Language,
    /, output: str | None, as_json: bool, repeats: int, concurrency: str, prompt_tokens: int, output_tokens: int,
    prefix_cache: Any, limits: str | None, goodput: str | None, lock_file: str, as_baseline: bool, own: tuple[str, ...],
    checkpoint: str | None, dry: bool, yes: bool, **place: Any,
) -> int:  # fmt: skip
    """Measure the server at URL by the fixed recipe.

    512 tokens in and 256 out at 1, 4 and 8 requests at once, a prefill test and a decode test, each three times.
    """
    recipe = Recipe(
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, concurrency=whole_numbers("--concurrency", concurrency),
        repeats=repeats, prefix_cache=prefix_cache,
    ).check()  # fmt: skip
    wanted = whole_numbers("--limits", limits) if limits else ()
    met = parse_goodput(goodput)
    if as_baseline and (wanted or met):
        raise click.UsageError(said("baseline_alone"))
    check_output(output)
    here = place_of(**place)
    lock = Path(lock_file).read_bytes() if Path(lock_file).is_file() else None
    if as_baseline:
        return run_baseline(here, recipe, own, lock, output, as_json=as_json, lang=lang, dry=dry, yes=yes, model=checkpoint)
    changes = [{"max-model-len": limit} for limit in wanted]
    if changes and not agreed(here, changes, replace(recipe, server_limits=wanted), lang, dry=dry, yes=yes):
        return EXIT_FINE
    result = asyncio.run(_run(here, recipe, changes, met, lock))
    deliver(result, output, as_json=as_json, lang=lang)
    return EXIT_FINDINGS if spoiled(result) else EXIT_FINE


def check_output(output: str | None) -> None:
    """That what is measured can be written when it is there. Errors: click.BadParameter."""
    folder = Path(output or ".").parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise click.BadParameter(said("output", folder=folder))


def ask_first(here: Place, recipe: Recipe) -> None:
    """Before anything is restarted: the URL answers, with this key and model, and the recipe fits; else nothing is touched.

    Errors: BenchError, RecipeError.
    """
    recipe.check()

    async def ask() -> int | None:
        async with here.client() as client:
            facts = await client.facts()
            await client.learn_tokens()
        return facts.max_model_len

    served = asyncio.run(ask())
    if served is not None and not recipe.server_limits:
        replace(recipe, server_limits=(served,)).check()


def agreed(here: Place, changes: Sequence[dict[str, Any]], recipe: Recipe, lang: Language, *, dry: bool, yes: bool) -> bool:
    """Whether the restarts may be done: asks, unless --yes; with --dry only tells.

    Errors: click.UsageError without a host; those of ask_first.
    """
    if here.host is None:
        raise click.UsageError(said("name_host"))
    ask_first(here, recipe)
    if dry:
        for change in changes:
            words = text("bench.restart_dry", lang, unit=UNIT, host=here.host.name, changes=told(change))
            click.echo(words, err=True)
        return False
    # One for each change, and one back.
    asked = text("bench.restart_ask", lang, unit=UNIT, host=here.host.name, count=len(changes) + 1)
    return yes or click.confirm(asked, err=True)


async def _run(
    here: Place, recipe: Recipe, changes: Sequence[dict[str, Any]], goodput: Goodput | None, lock: bytes | None, *,
    restarted: bool = False,
) -> dict[str, Any]:  # fmt: skip
    cells: list[Cell] = []
    watch = CardWatch(here.host) if here.host else None
    facts: ServerFacts | None = None
    flags = here.host.flags() if here.host else None
    with watch or contextlib.nullcontext(), changing(here) as change:
        for flags_now in changes or [{}]:
            await asyncio.to_thread(change, flags_now)
            async with here.client() as client:
                facts = await here.facts(client, AFTER_RESTART_S if flags_now or restarted else 0)
                limit = facts.max_model_len
                if limit is not None:
                    replace(recipe, server_limits=(limit,)).check()
                cells += await measure(client, recipe, limit, goodput, say)
    assert facts is not None
    samples = watch.samples if watch else []
    source = provenance(here.target.url, facts, report=here.report, flags=flags, lock=lock, samples=samples)
    if watch is not None and not samples:
        source["cards_unread"] = watch.trouble or "no sample came"
    elif watch is None:
        source["cards_unread"] = "no --host was given"
    said: list[Message] = [*([message("bench.simulated")] if source["simulated"] else []), *cards.banners(samples)]
    return result_of(recipe, cells, source, said)


def changing(here: Place) -> AbstractContextManager[Callable[[Mapping[str, Any]], None]]:
    """The host's flags as something to change for a while; nothing where no host is known."""
    if here.host is None:
        return contextlib.nullcontext(lambda flags: None)
    return here.host.changes(START_DEADLINE_S, say)


def say(line: str) -> None:
    """Progress, to stderr."""
    click.echo(line, err=True)


def whole_numbers(option: str, words: str) -> tuple[int, ...]:
    """`1,4,8` as numbers. Errors: click.BadParameter."""
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise click.BadParameter(said("whole_numbers", option=option, word=words)) from None


def parse_goodput(words: str | None) -> Goodput | None:
    """`ttft:500,tpot:50` as limits. Errors: click.BadParameter."""
    if words is None:
        return None
    found: dict[str, float] = {}
    for word in words.split(","):
        name, _, limit = word.partition(":")
        try:
            if name not in ("ttft", "tpot", "e2el"):
                raise ValueError
            found[f"{name}_ms"] = float(limit)
            if not 0 < found[f"{name}_ms"] < math.inf:
                raise ValueError
        except ValueError:
            raise click.BadParameter(said("goodput", word=word)) from None
    return Goodput(**found)


def spoiled(result: dict[str, Any]) -> bool:
    """Whether a banner says something against the figures; that they are simulated is no finding."""
    return any(banner["id"] != "bench.simulated" for banner in result["banners"])


def deliver(result: dict[str, Any], output: str | None, *, as_json: bool, lang: Language) -> None:
    """Write the files, print the tables. Errors: OSError."""
    document = json.dumps(result, ensure_ascii=False, indent=1) + "\n"
    if output:
        base = output.removesuffix(".json")
        write_atomic(f"{base}.json", document)
        write_atomic(f"{base}.csv", tables.as_csv(result))
        write_atomic(f"{base}.svg", tables.picture(result))
        click.echo(text("bench.written", lang, paths=f"{base}.json, {base}.csv, {base}.svg"), err=True)
    if as_json:
        click.echo(document, nl=False)
        return
    show(result, console(), lang)


def console() -> Console:
    """A console that keeps its tables whole when nobody watches."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def banner_text(banner: dict[str, Any], lang: Language) -> str:
    """A banner of a result in a language."""
    return text(banner["id"], lang, **banner["values"])


def show(result: dict[str, Any], out: Console, lang: Language) -> None:
    """Print a result for a person: banners first, they say what the figures are worth."""
    from rich.markup import escape
    from rich.table import Table

    source, recipe = result["provenance"], result["recipe"]
    for banner in result["banners"]:
        out.print(f"[bold yellow]{escape(banner_text(banner, lang))}[/bold yellow]")
    version = source["engine_version"] or text("bench.unknown_version", lang)
    out.print(escape(text("bench.head", lang, model=source["model"], url=source["url"], version=version, recipe=result["recipe_id"],
                          prompt=recipe["prompt_tokens"], output=recipe["output_tokens"])))  # fmt: skip
    table = Table("", *(head for head, _ in tables.COLUMNS))
    for cell in result["cells"]:
        if cell["kind"] == "serve":
            table.add_row(cell["label"], *(tables.with_spread(cell, figure) for _, figure in tables.COLUMNS))
    out.print(table)
    for cell in result["cells"]:
        values = {"cell": cell["label"], "speed": tables.speed_of(cell)}
        if cell["kind"].startswith("prefill"):
            ttft = tables.with_spread(cell, "mean_ttft_ms")
            out.print(text("bench.prefill_line", lang, **values, ttft=ttft, tokens=recipe["prefill_tokens"]))
        elif cell["kind"] == "decode":
            key = "decode_line" if "decode_tok_s" in cell["spread"] else "decode_unmeasured"
            out.print(text(f"bench.{key}", lang, **values, tokens=recipe["decode_tokens"]))
            if tpot_ms := server_tpot_ms(cell["server"], cell["repeats"]):
                out.print(text("bench.decode_server", lang, cell=cell["label"], speed=tables.number(1000 / tpot_ms)), style="dim")
    _show_server(result, out, lang)
    for card in source["cards_during"]:
        out.print(escape(text("bench.card_line", lang, card=card["address"], name=card["name"], clock=_span(card["sm_clock_mhz"]),
                              temperature=_span(card["core_temperature_c"]), power=_span(card["power_draw_w"]),
                              limit=card["power_limit_w"])), style="dim")  # fmt: skip
    if why := source.get("cards_unread"):
        why = text("bench.cards_no_host", lang) if why == "no --host was given" else why
        out.print(escape(text("bench.cards_unread", lang, why=why)), style="dim")


def _span(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['low']:g}-{value['high']:g}"


def _show_server(result: dict[str, Any], out: Console, lang: Language) -> None:
    told = [cell["server"] for cell in result["cells"] if cell["server"] is not None]
    if not told:
        out.print(text("bench.metrics_unread", lang), style="yellow")
        return
    own = [cell["server"] for cell in result["cells"] if cell["server"] is not None and cell["kind"] != "prefill-again"]
    if result["recipe"]["prefix_cache"] == "defeated":
        hits, queries = (sum(server[f"prefix_cache_{name}"] or 0 for server in own) for name in ("hits", "queries"))
        out.print(text("bench.cache_defeated", lang, hits=f"{hits:.0f}", queries=f"{queries:.0f}"), style="dim")
    drafted = [server for server in told if server["spec_decode_acceptance"] is not None]
    if drafted:
        mean = sum(server["spec_decode_acceptance"] for server in drafted) / len(drafted)
        rounds = sum(server["spec_decode_tokens_per_round"] for server in drafted) / len(drafted)
        out.print(text("bench.acceptance", lang, percent=f"{100 * mean:.0f}", tokens=f"{rounds:.2f}"))


# ---- compare ------------------------------------------------------------------------------------------------------------


def load_result(path: str) -> dict[str, Any]:
    """A result out of a file. Errors: NotComparable when it is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotComparable(f"{path}: {getattr(error, 'strerror', None) or 'it is not JSON'}") from None
    if not isinstance(found, dict) or "laoka_bench" not in found:
        raise NotComparable(f"{path}: it is not a result of laoka bench (-o writes one)")
    return found


@command.command("compare")
@click.argument("first", type=click.Path(exists=True, dir_okay=False))
@click.argument("second", type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="A JSON object instead of a table.")
@click.pass_obj
def compare_command(lang: Language, first: str, second: str, as_json: bool) -> int:
    """Compare two results of one recipe: SECOND over FIRST, and whether that is more than the noise of the repeats.

    Exit status: 0 nothing is worse, 1 something is worse beyond the noise, 2 they don't compare.
    """
    both = load_result(first), load_result(second)
    lines = compare(*both)
    if as_json:
        content = {"lines": [vars(line) for line in lines], "notes": list(notes(*both))}
        click.echo(json.dumps(content, ensure_ascii=False, indent=1))
    else:
        show_lines(lines, notes(*both), (Path(first).name, Path(second).name), lang)
    return EXIT_FINDINGS if any(line.judgement == "worse" for line in lines) else EXIT_FINE


def show_lines(lines: Sequence[Line], differ: Sequence[str], names: tuple[str, str], lang: Language) -> None:
    """Print a comparison for a person."""
    from rich.markup import escape
    from rich.table import Table

    heads = [text(f"bench.compare_head_{name}", lang) for name in ("cell", "figure", "ratio", "noise", "verdict")]
    table = Table(*heads[:2], *names, *heads[2:])
    colours = {"better": "green", "worse": "red"}
    for line in lines:
        verdict = text(f"bench.{line.judgement}", lang)
        colour = colours.get(line.judgement, "dim")
        table.add_row(
            line.cell, line.figure, tables.number(line.first), tables.number(line.second),
            "-" if line.ratio is None else f"{line.ratio:.3f}", "-" if line.noise is None else f"±{line.noise:.3f}",
            f"[{colour}]{escape(verdict)}[/{colour}]",
        )  # fmt: skip
    out = console()
    out.print(table)
    for words in differ:
        out.print(escape(text("bench.compare_differs", lang, what=words)), style="yellow")


# ---- ramp ---------------------------------------------------------------------------------------------------------------


@command.command("ramp")
@place_options
@click.option("-o", "--output", metavar="NAME", help="Write NAME.json and NAME.svg.")
@click.option("--json", "as_json", is_flag=True, help="The whole result as JSON instead of a table.")
@click.option("--most", type=click.IntRange(1, 1024), default=64, show_default=True, help="Requests at once, at the most.")
@click.option(
    "--requests-per-stream",
    type=click.IntRange(1, 100),
    default=Recipe.requests_per_stream,
    show_default=True,
    help="Requests of each stream, one after the other.",
)
@click.option("--goodput", metavar="ttft:MS,tpot:MS,e2el:MS", help="Limits in ms that 99 % of the requests have to meet.")
@click.pass_obj
def ramp_command(
    lang: Language, /, output: str | None, as_json: bool, most: int, requests_per_stream: int, goodput: str | None, **place: Any
) -> int:
    """Load the server with 1, 2, 4, 8, ... requests at once until throughput stops growing.

    Tells the knee, where the queue and the preemptions begin, and a number of seats (max-num-seqs) for `laoka plan --ramp FILE`.
    """
    met = parse_goodput(goodput)
    check_output(output)
    here = place_of(**place)
    wanted = Recipe(requests_per_stream=requests_per_stream)
    steps, knee, source, recipe = asyncio.run(_ramp(here, wanted, most, met))
    result = ramp.ramp_table(steps, knee, recipe, source)
    document = json.dumps(result, ensure_ascii=False, indent=1) + "\n"
    if output:
        base = output.removesuffix(".json")
        points = {"": [(step.mean_e2el_ms, step.output_throughput) for step in steps]}
        write_atomic(f"{base}.json", document)
        write_atomic(f"{base}.svg", tables.as_svg(points, tables.title("laoka bench ramp", source), *tables.AXES))
        click.echo(text("bench.written", lang, paths=f"{base}.json, {base}.svg"), err=True)
    if as_json:
        click.echo(document, nl=False)
    else:
        show_ramp(steps, knee, source, lang)
    return EXIT_FINE


async def _ramp(
    here: Place, recipe: Recipe, most: int, goodput: Goodput | None
) -> tuple[list[ramp.Step], ramp.Knee, dict[str, Any], Recipe]:
    flags = here.host.flags() if here.host else None
    counts = [2**power for power in range(11) if 2**power <= most]
    async with here.client() as client:
        facts = await here.facts(client)
        limits = () if facts.max_model_len is None else (facts.max_model_len,)
        recipe = replace(recipe, concurrency=tuple(counts), repeats=1, server_limits=limits).check()
        steps = await ramp.climb(client, recipe, counts, goodput, say)
    seats = flags.get("max-num-seqs") if flags else None
    knee = ramp.find_knee(steps, seats if isinstance(seats, int) else None)
    return steps, knee, provenance(here.target.url, facts, report=here.report, flags=flags), recipe


def show_ramp(steps: Sequence[ramp.Step], knee: ramp.Knee, source: Mapping[str, Any], lang: Language) -> None:
    """Print a ramp for a person."""
    from rich.markup import escape
    from rich.table import Table

    out = console()
    if source["simulated"]:
        out.print(f"[bold yellow]{escape(text('bench.simulated', lang))}[/bold yellow]")
    heads = [text(f"bench.ramp_head_{name}", lang) for name in ("at_once", "wait", "waiting", "preemptions")]
    table = Table(heads[0], "tok/s", "TTFT ms", "p99", "E2EL ms", "p99", *heads[1:], "KV")
    for step in steps:
        row = [
            tables.number(value)
            for value in (
                step.output_throughput, step.mean_ttft_ms, step.p99_ttft_ms, step.mean_e2el_ms, step.p99_e2el_ms
            )
        ]  # fmt: skip
        usage = "-" if step.kv_usage is None else f"{100 * step.kv_usage:.0f} %"
        wait = "-" if step.mean_wait_ms is None else tables.number(step.mean_wait_ms)
        table.add_row(str(step.concurrency), *row, wait, _or_dash(step.most_waiting), _or_dash(step.preemptions), usage)
    out.print(table)
    unknown = all(step.most_waiting is None and step.mean_wait_ms is None for step in steps)
    none = text("bench.ramp_unknown" if unknown else "bench.ramp_none", lang)
    queueing, preemption = (none if value is None else value for value in (knee.first_queueing, knee.first_preemption))
    out.print(text("bench.ramp_found", lang, knee=knee.knee, queueing=queueing, preemption=preemption))
    out.print(escape(text(f"bench.{knee.reason}", lang, seats=knee.suggested_max_num_seqs)))
    out.print(escape(text("bench.ramp_next", lang, seats=knee.suggested_max_num_seqs)))


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


# ---- baseline -----------------------------------------------------------------------------------------------------------


def run_baseline(
    here: Place, recipe: Recipe, own: Sequence[str], lock: bytes | None, output: str | None, *, as_json: bool, lang: Language,
    dry: bool, yes: bool, model: str | None,
) -> int:  # fmt: skip
    """Measure the host with each way of speculation, and say what that means. Errors: those of measuring."""
    if here.host is None:
        raise click.UsageError(said("name_host"))
    variants = baseline.variants_of(here.host.flags(), parse_variants(own))
    if not agreed(here, [{baseline.FLAG: config} for config in variants.values()], recipe, lang, dry=dry, yes=yes):
        return EXIT_FINE

    async def once() -> dict[str, Any]:
        return await _run(here, recipe, (), None, lock, restarted=True)

    results = asyncio.run(baseline.measure_variants(here.host, variants, once, START_DEADLINE_S, say))
    found = baseline.ratios(results)
    choice = baseline.choose(found)
    beside = beside_of(here, results, model)
    content = {
        "laoka_baseline": 1, "variants": variants, "results": results, "ratios": [vars(item) for item in found],
        "choice": vars(choice), "beside": beside,
    }  # fmt: skip
    document = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    if output:
        write_atomic(f"{output.removesuffix('.json')}.json", document)
    if as_json:
        click.echo(document, nl=False)
    else:
        show_baseline(results, found, choice, beside, lang)
    return EXIT_FINDINGS if any(row["verdict"] == "baseline_under" for row in beside) else EXIT_FINE


def parse_variants(words: Sequence[str]) -> dict[str, Any]:
    """`NAME=JSON` pairs. Errors: click.BadParameter."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, config = word.partition("=")
        try:
            found[name] = json.loads(config)
        except ValueError:
            equals = ""
        if not equals or not name or not isinstance(found.get(name), dict):
            raise click.BadParameter(said("variant", word=word[:80]))
    return found


SPECULATION: Mapping[str, Speculative] = {baseline.TARGET_ONLY: "none", "dflash2": "dflash2", "mtp": "mtp"}


def beside_of(here: Place, results: Mapping[str, Mapping[str, Any]], model: str | None) -> list[dict[str, Any]]:
    """Each variant's decode speed beside its ceiling and the nearest published profile, for the host's own cards."""
    rows = []
    for name, result in results.items():
        measured, speculative = baseline.decode_speed(result), SPECULATION.get(name)
        row: dict[str, Any] = {"variant": name, "decode_tok_s": measured, "ceiling_tok_s": None, "published_tok_s": None,
                               "published_by": None, "why_none": None, "verdict": None}  # fmt: skip
        tokens = result["recipe"]["decode_prompt_tokens"] + result["recipe"]["decode_tokens"]
        plan = planned(here, model, speculative, tokens) if speculative else "bench.baseline_no_profile"
        if isinstance(plan, str):
            row["why_none"] = plan
        else:
            ceiling = baseline.ceiling_of(plan.ceilings, plan.speculative)
            near = baseline.nearest(plan.profiles, plan.speculative, tokens)
            row["ceiling_tok_s"] = ceiling
            if near is not None:
                row["published_tok_s"], row["published_by"] = near[1], f"{near[0].id}, {near[0].source}"
            if measured is None:
                row["why_none"] = "bench.baseline_unmeasured"
            elif result["provenance"]["simulated"]:
                row["why_none"] = "bench.baseline_simulated"
            else:
                row["verdict"] = baseline.verdict(measured, row["published_tok_s"], ceiling)
        rows.append(row)
    return rows


def planned(here: Place, model: str | None, speculative: Speculative, tokens: int) -> Stack | str:
    """The plan for the host's cards with a way of speculation, or a key that says why there is none."""
    if here.report is None:
        return "bench.baseline_no_host"
    try:
        facts = facts_of(here.report)
        checkpoint = checkpoint_of(model or DEFAULT_MODEL)
        outcome = resolve(
            Request(facts.cards, checkpoint=checkpoint, os_release=facts.os_release, kernel=facts.kernel, glibc=facts.glibc,
                    python=facts.python, context_tokens=tokens, speculative=speculative)
        )  # fmt: skip
    except (RequestError, CheckpointError):
        return "bench.baseline_no_plan"
    return outcome if isinstance(outcome, Stack) else "bench.baseline_no_plan"


def show_baseline(
    results: Mapping[str, Mapping[str, Any]], found: Sequence[baseline.Ratio], choice: baseline.Choice,
    beside: Sequence[Mapping[str, Any]], lang: Language,
) -> None:  # fmt: skip
    """Print a baseline for a person."""
    from rich.markup import escape
    from rich.table import Table

    out = console()
    said = {banner["id"]: banner_text(banner, lang) for result in results.values() for banner in result["banners"]}
    for words in said.values():
        out.print(f"[bold yellow]{escape(words)}[/bold yellow]")
    heads = [text(f"bench.compare_head_{name}", lang) for name in ("cell", "figure", "ratio", "noise", "verdict")]
    table = Table(text("bench.baseline_head_variant", lang), *heads[:2], baseline.TARGET_ONLY, "", *heads[2:])
    for item in found:
        table.add_row(
            item.variant, item.cell, item.figure, tables.number(item.alone), tables.number(item.value),
            "-" if item.ratio is None else f"{item.ratio:.2f}x", "-" if item.noise is None else f"±{item.noise:.2f}",
            text(f"bench.{item.judgement}", lang),
        )  # fmt: skip
    out.print(table)
    for name, result in results.items():
        for cell in result["cells"]:
            server = cell["server"]
            if cell["kind"] == "decode" and server and server["spec_decode_acceptance"] is not None:
                percent, tokens = f"{100 * server['spec_decode_acceptance']:.0f}", f"{server['spec_decode_tokens_per_round']:.2f}"
                out.print(f"{escape(name)}: {text('bench.acceptance', lang, percent=percent, tokens=tokens)}")
    for row in beside:
        figures = {key: tables.number(row[f"{key}_tok_s"]) for key in ("decode", "ceiling", "published")}
        out.print(escape(text("bench.baseline_beside", lang, variant=row["variant"], **figures, source=row["published_by"] or "-")))
        if key := row["why_none"] or (row["verdict"] and f"bench.{row['verdict']}"):
            out.print(f"  {escape(text(key, lang))}")
    out.print(text("bench.baseline_claim", lang), style="dim")
    ratio = "-" if choice.decode_ratio is None else f"{choice.decode_ratio:.2f}"
    out.print(escape(text(f"bench.{choice.reason}", lang, variant=choice.variant, ratio=ratio)))
