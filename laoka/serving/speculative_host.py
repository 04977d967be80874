"""Decides on speculative decoding on the host itself: proves the kernels, looks at the target, has the drafter, keeps the decision.

Run on the host: `python -m laoka.serving.speculative_host --plan JSON`. Exit status 0 decided (also when it is off), 1 when the
inventory asks for exactly what this host can't have.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import syslog
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from laoka.files import write_atomic
from laoka.serving import model_store
from laoka.serving.engine_install import site_packages, stamp_of
from laoka.serving.engine_pin import CURRENT, ENGINES, EngineError
from laoka.serving.kernels import DRAFTER_ARCHITECTURE, Folder, prove, prove_live
from laoka.serving.manifest import ModelError, is_pinned
from laoka.serving.model_inspect import inspect
from laoka.serving.model_names import wish_of
from laoka.serving.model_source import Source, listing_of_folder
from laoka.serving.speculative import (
    DECISION,
    DRAFTER,
    Decision,
    Evidence,
    Had,
    Plan,
    SpeculativeError,
    decide,
    parse_plan,
    wants_drafter,
)
from laoka.serving.switch import set_link

Say = Callable[[str], None]

CARD = Path("/dev/nvidiactl")
"""There when the driver is loaded; without it nothing can be proven live."""


def look(plan: Plan, engines: Path, card: Path = CARD) -> Evidence:
    """What this host shows of what a plan needs: the engine's kernels by their files and live, the target's headers."""
    if plan.own or plan.method == "none":
        return Evidence(kernels={"kind": plan.kernels})
    seen = _target(Path(plan.target))
    if plan.method == "mtp" or plan.kernels == "none":
        return replace(seen, kernels={"kind": plan.kernels})
    folder = (engines / CURRENT).resolve()
    if stamp_of(folder) != plan.engine_stamp:
        told = f"{engines / CURRENT} is {folder.name} ({stamp_of(folder) or 'not whole'}), not {plan.engine}"
        return replace(seen, kernels={"kind": plan.kernels, "ok": False}, kernel_faults=(told,), transient=True)
    try:
        proof = prove(Folder(site_packages(folder)), plan.kernels, plan.version)
    except (EngineError, OSError) as error:
        return replace(seen, kernels={"kind": plan.kernels, "ok": False}, kernel_faults=(str(error),))
    table = proof.table()
    if not proof.ok:
        return replace(seen, kernels=table, kernel_faults=proof.faults)
    if not card.exists():
        why = f"their files are right, but no card answers ({card} is not there), and only a card proves them"
        return replace(seen, kernels={**table, "live": None}, kernel_faults=(why,), transient=True)
    told_live, faults = prove_live(folder / "bin" / "python", plan.kernels)
    return replace(seen, kernels={**table, "live": told_live, "ok": not faults}, kernel_faults=faults, transient=bool(faults))


def _target(folder: Path) -> Evidence:
    """What the headers of the target's files show."""
    if not folder.is_dir():
        return Evidence(target_fault=f"the target {folder} is not on this host yet", transient=True)
    try:
        seen = inspect(folder.parent.name, Source("folder", str(folder)), listing_of_folder(folder)).seen
    except ModelError as error:
        return Evidence(target_fault=str(error))
    if seen is None:
        return Evidence(target_fault=f"{folder} has no safetensors file whose header could be read")
    return Evidence(lm_head_plain=seen.lm_head_is_plain, mtp_weights=seen.mtp > 0)


def have_drafter(plan: Plan, store: Path, say: Say) -> Had:
    """The drafter at its pinned revision, every file by its hash, fetched unless it is there."""
    drafter = plan.drafter or {}
    repo, revision = str(drafter.get("repo", "")), str(drafter.get("revision") or "")
    if not is_pinned(revision):
        return Had(None, f"{repo}: no whole revision is known that would pin it")
    try:
        wish = wish_of(repo, revision, tuple(drafter.get("sources", ())), drafter.get("pins"))
        folder = model_store.fetch(store, wish, say=say, progress=_progress(say))
    except (ModelError, OSError) as error:
        return Had(None, str(error))
    kinds = _architectures(folder)
    if DRAFTER_ARCHITECTURE not in kinds:
        return Had(None, f"{repo} is a {', '.join(kinds) or 'model without architecture'}, not a {DRAFTER_ARCHITECTURE}")
    return Had(str(folder))


def _progress(say: Say) -> Callable[[int, int], None]:
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        step = 10 * done // max(total, 1)
        if step > shown:
            shown = step
            say(f"drafter: {10 * step} % of {total / 1e9:.2f} GB")

    return show


def _architectures(folder: Path) -> tuple[str, ...]:
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(map(str, told)) if isinstance(told, list) else ()


def settle(plan: Plan, engines: Path, store: Path, say: Say, *, card: Path = CARD) -> Decision:
    """Decide on this host; the drafter is fetched when all else speaks for it, and kept from pruning while it is in use."""
    evidence = look(plan, engines, card)
    had = have_drafter(plan, store, say) if wants_drafter(plan, evidence) else None
    decision = replace(decide(plan, evidence, had), engine=os.path.realpath(engines / CURRENT))
    link = store / DRAFTER
    if decision.method == "dflash" and had is not None and had.folder is not None:
        set_link(link, had.folder)
    elif not decision.again:
        link.unlink(missing_ok=True)
    return decision


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.speculative_host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", required=True, help="the plan as JSON")
    parser.add_argument("--engines", type=Path, default=ENGINES)
    parser.add_argument("--store", type=Path, default=model_store.STORE)
    parser.add_argument("--decision", type=Path, default=DECISION, help="where the decision is kept")
    words = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        decision = settle(parse_plan(words.plan), words.engines, words.store, say)
        write_atomic(words.decision, decision.to_json())
    except (SpeculativeError, OSError) as error:
        print(f"speculative: {error}", file=sys.stderr)
        return 1
    syslog.openlog("laoka-speculative")
    syslog.syslog(syslog.LOG_NOTICE, decision.reason)
    print(decision.reason)
    if decision.refused:
        say(f"speculative = {decision.wanted!r} in the inventory can't be had: {decision.reason}; auto takes what is possible")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
