"""Whether a host serves with speculative decoding: what was planned, what the host's own files prove, and what follows. Pure.

There is no method called dflash2: the engine knows `dflash`, and takes DFlash2 from the drafter's architecture. It needs kernels
inside the engine, a target whose lm_head is not quantised (1Cat-vLLM #592), and a drafter that every GPU holds whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from laoka.serving.kernels import Kind

DECISION = Path("/var/lib/laoka/speculative.json")
"""Where a host keeps its decision; whoever wants to know reads it (laoka audit, the serve role, a person)."""
DRAFTER = "drafter"
"""The link in the model store that keeps the drafter in use from being pruned."""

Method = Literal["dflash2", "mtp", "none"]
Wanted = Literal["auto", "dflash2", "mtp", "none", "measure"]

NOT_MEASURED = (
    "wanted, not done: laoka bench run URL --host HOST --baseline -o FILE.json, then speculative_measured = FILE.json; "
    "until then as auto"
)


class SpeculativeError(Exception):
    """A plan that can't be read; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """What inventory, lock and memory plan allow on a host; made before the host is asked.

    `reason` says why it is `method` and not more; `fallback` is what else fits where the host can't prove `method`. `engine` is
    NAME==VERSION and `engine_stamp` what its finished environment says; `target` is the folder of the model's revision.
    `drafter` is {"repo", "revision", "sources", "pins"}; `configs` is the engine's --speculative-config by method.
    """

    wanted: Wanted
    method: Method
    reason: str
    engine: str
    engine_stamp: str
    kernels: Kind
    target: str
    fallback: Method = "none"
    drafter: Mapping[str, Any] | None = None
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measurement: str | None = None
    """What is known of a comparison on this host, where one is wanted."""
    own: bool = False
    """The inventory's serve_flags bring a --speculative-config of their own: it is used as it is."""

    @property
    def version(self) -> str:
        """The engine's version."""
        return self.engine.partition("==")[2]

    @property
    def certain(self) -> bool:
        """Whether the wish leaves no room for anything else."""
        return self.wanted in ("dflash2", "mtp") and not self.own

    def to_json(self) -> str:
        """One line, always the same for the same plan."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def key(self) -> str:
        """What a decision notes, so that it is made anew when the plan is another one."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def parse_plan(text: str) -> Plan:
    """The plan of `Plan.to_json`. Errors: SpeculativeError."""
    try:
        return Plan(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise SpeculativeError(f"the plan is not one: {type(error).__name__} {str(error)[:80]}") from None


@dataclass(frozen=True)
class Evidence:
    """What a host shows. `kernels` is the proof for the record, `kernel_faults` what is wrong with them; empty: proven.

    `lm_head_plain` None where the headers show neither lm_head nor embeddings; `mtp_weights` whether the target has MTP's own;
    `target_fault` why its headers can't be read. `transient`: it may be another one at the next run (a card that is not there).
    """

    kernels: Mapping[str, Any] = field(default_factory=dict)
    kernel_faults: tuple[str, ...] = ()
    lm_head_plain: bool | None = None
    mtp_weights: bool = False
    target_fault: str = ""
    transient: bool = False


@dataclass(frozen=True)
class Had:
    """The drafter on the host: its folder, or why it can't be had."""

    folder: str | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is decided, and kept. `method` is the word of the engine's command line: "dflash", "mtp", or None.

    `model` and `revision` are the drafter's; `config` is what --speculative-config gets; `again`: the next run tries once more.
    """

    method: str | None
    reason: str
    model: str | None = None
    revision: str | None = None
    tokens: int = 0
    kernels: Mapping[str, Any] = field(default_factory=dict)
    lm_head_plain: bool | None = None
    wanted: str = "auto"
    measurement: str | None = None
    config: Mapping[str, Any] | None = None
    refused: bool = False
    """True: the inventory wants exactly what this host can't have."""
    again: bool = False
    decided_for: str = ""
    """The plan's key."""
    engine: str = ""
    """The folder of the engine, and of the target, that it was decided with."""
    target: str = ""

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def parse_decision(text: str) -> Decision | None:
    """A decision as it was kept; None for what is none."""
    try:
        raw = json.loads(text)
        known = {item.name for item in fields(Decision)}
        return Decision(**{key: value for key, value in raw.items() if key in known})
    except (ValueError, TypeError, AttributeError):
        return None


def kernels_missing(plan: Plan, evidence: Evidence) -> str | None:
    """Why DFlash2 can't run on this host whatever drafter there is; None when it can."""
    if plan.kernels == "none":
        return f"{plan.engine} has no DFlash2 kernels"
    if evidence.kernel_faults:
        return f"the kernels of {plan.engine} are not proven: {'; '.join(evidence.kernel_faults)}"
    if evidence.target_fault:
        return evidence.target_fault
    if evidence.lm_head_plain is None:
        return "the target's files show neither lm_head nor embeddings: whether they are quantised is not known"
    if not evidence.lm_head_plain:
        return "the target's lm_head is quantised, and the drafter shares it (1Cat-vLLM #592): take a checkpoint with a 16-bit one"
    return None


def mtp_missing(plan: Plan, evidence: Evidence) -> str | None:
    """Why MTP can't be used on this host; None when it can."""
    if "mtp" not in plan.configs:
        return "the engine or the model has no MTP"
    if evidence.target_fault:
        return evidence.target_fault
    if not evidence.mtp_weights:
        return "the target's files hold no MTP weights (mtp.*)"
    return None


def decide(plan: Plan, evidence: Evidence, had: Had | None = None) -> Decision:
    """The decision for a plan and what the host shows.

    Arguments: `had` is the drafter on the host; needed only where `wants_drafter` says so.
    """
    if plan.own:
        config = plan.configs.get("own", {})
        model, revision = config.get("model"), config.get("revision")
        return _made(
            plan, evidence, str(config.get("method", "?")), f"the inventory's own serve_flags, not judged: {plan.reason}",
            model=str(model) if model else None, revision=str(revision) if revision else None,
            tokens=int(config.get("num_speculative_tokens") or 0),
        )  # fmt: skip
    if plan.method == "none":
        return _made(plan, evidence, None, f"off: {plan.reason}", refused=plan.certain)
    if plan.method == "mtp":
        why = mtp_missing(plan, evidence)
        if why is None:
            return _mtp(plan, evidence, f"MTP: {plan.reason}")
        return _made(plan, evidence, None, f"off: {why}; {plan.reason}", refused=plan.certain, again=evidence.transient)
    why = kernels_missing(plan, evidence)
    if why is None and had is not None and had.folder is None:
        why = f"the drafter can't be had: {had.why}"
    if why is None and had is not None and had.folder is not None and plan.drafter is not None:
        config = {key: value for key, value in plan.configs["dflash2"].items() if key != "revision"} | {"model": had.folder}
        repo, revision = str(plan.drafter["repo"]), str(plan.drafter["revision"])
        tokens = int(config.get("num_speculative_tokens", 0))
        proven = "by its files and by importing it" if evidence.kernels.get("live") else "by its files"
        reason = (
            f"DFlash2, {tokens} tokens a round: {plan.engine} proven {proven}, the target's lm_head is not quantised, "
            f"{repo}@{revision[:12]} by its hashes; {plan.reason}"
        )
        return _made(
            plan, evidence, "dflash", reason, model=repo, revision=revision, tokens=tokens, config=config, again=evidence.transient
        )
    why = why or "the plan names no drafter"
    again = evidence.transient or had is not None
    if plan.certain:
        return _made(plan, evidence, None, f"off: {why}", refused=True, again=True)
    if plan.fallback == "mtp" and mtp_missing(plan, evidence) is None:
        return _mtp(plan, evidence, f"MTP instead of DFlash2: {why}", again=again)
    return _made(plan, evidence, None, f"off: {why}", again=again)


def wants_drafter(plan: Plan, evidence: Evidence) -> bool:
    """Whether the drafter has to be there before `decide`: everything else speaks for DFlash2."""
    return plan.method == "dflash2" and not plan.own and plan.drafter is not None and kernels_missing(plan, evidence) is None


def _mtp(plan: Plan, evidence: Evidence, reason: str, *, again: bool = False) -> Decision:
    config = plan.configs["mtp"]
    tokens = int(config.get("num_speculative_tokens", 0))
    return _made(plan, evidence, "mtp", f"{reason}; {tokens} tokens a round", tokens=tokens, config=config, again=again)


def _made(plan: Plan, evidence: Evidence, method: str | None, reason: str, **rest: Any) -> Decision:
    return Decision(
        method=method, reason=reason, kernels=evidence.kernels, lm_head_plain=evidence.lm_head_plain, wanted=plan.wanted,
        measurement=plan.measurement, decided_for=plan.key, target=plan.target, **rest,
    )  # fmt: skip
