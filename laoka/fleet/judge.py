"""Rules of the audit: one host's report against what it should be, as findings. Pure.

The wording of each is in catalog/messages/checks.audit.toml, in the form that all checks have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from laoka import checks
from laoka.checks.driver import branch_of, version_in_use
from laoka.checks.facts import cards, listed_cards
from laoka.checks.finding import Finding, Outcome
from laoka.checks.registry import CHECKS, Check, Wanted, fail, info, ok, run_one, unread, warn
from laoka.fleet.expected import Expected
from laoka.host.deployed import DRAFTER, ENGINE, MODEL, Deployed, PlacedModel, is_pseudonym
from laoka.host.packages import Candidate
from laoka.host.report import HostReport
from laoka.host.unread import Maybe, Unread

DAY_S = 86400
ALERT_TEST_MAX_AGE_S = 90 * DAY_S
STATE_MAX_AGE_S = 60
"""The watchdog writes its state every few seconds, also when there is no news."""
RECENT_S = 7 * DAY_S

# What `laoka check` looks at and an audit repeats: drift of driver, kernel and cards, and whatever stops a deploy.
_AREAS = ("driver", "kernel", "cards")
_MORE = ("leftovers.cuda-13", "power.last-boot-end", "xid.fell-off")
AUDITED_CHECKS = tuple(known.id for known in CHECKS.values() if known.gate or known.area in _AREAS or known.id in _MORE)

Rule = Callable[[HostReport, Expected], Iterable[Outcome]]
RULES: dict[str, tuple[str, Rule, str]] = {}
"""(area, function, source) by id."""


def rule(rule_id: str, area: str, source: str) -> Callable[[Rule], Rule]:
    """Register a rule. Arguments: `area` of its findings; `source` where its facts come from."""

    def register(function: Rule) -> Rule:
        RULES[rule_id] = (area, function, source)
        return function

    return register


def judge(report: HostReport, expected: Expected) -> tuple[Finding, ...]:
    """Every finding of an audit about one host: the rules here, and the checks that an audit repeats."""
    count = None if expected.cards is None else len(expected.cards)
    found = list(checks.run(report, expected_gpus=count, only=AUDITED_CHECKS))
    for rule_id, (area, function, source) in RULES.items():
        bound = Check(rule_id, area, lambda one, _, function=function: function(one, expected), False, source)  # type: ignore[misc]
        found += run_one(bound, report, Wanted(count))
    return tuple(found)


# ------------------------------------------------------------------------------------------------ the lock, the driver


@rule("audit.locked", "driver", "stack.lock.toml")
def locked(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The lock has this host."""
    if expected.locked is None:
        yield info("none", "no stack.lock.toml: judged by the inventory alone")
    elif not expected.locked:
        yield fail("missing", "the lock does not have this host")
    else:
        yield ok("the lock has this host")


@rule("audit.driver", "driver", "/proc/driver/nvidia/version, the lock")
def driver(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The driver that is loaded is the locked one: version where one is fixed, else the branch."""
    if expected.driver_branch is None and expected.driver_version is None:
        return
    version = version_in_use(report)
    if isinstance(version, Unread):
        yield unread(version)
        return
    wanted = expected.driver_version or f"{expected.driver_branch}.*"
    if not version:
        return  # driver.loaded says so
    same = version == expected.driver_version if expected.driver_version else str(branch_of(version)) == expected.driver_branch
    evidence = (f"loaded: {version}", f"wanted: {wanted}")
    yield ok(*evidence, version=version) if same else fail("other", *evidence, version=version, wanted=wanted)


@rule("audit.flavour", "driver", "/proc/driver/nvidia/version, the lock")
def flavour(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The module is of the locked flavour, open or proprietary."""
    module = report.driver.loaded
    if expected.module_flavour is None or isinstance(module, Unread) or module is None:
        return
    evidence = f"loaded: {module.flavour}, locked: {expected.module_flavour}"
    same = module.flavour == expected.module_flavour
    yield ok(evidence) if same else fail("other", evidence, seen=module.flavour, wanted=expected.module_flavour)


@rule("audit.apt-tonight", "driver", "apt-cache policy of every driver and kernel package, dpkg holds, apt-config dump")
def apt_tonight(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """What apt would do to driver and kernel packages: tonight by itself, or when somebody types apt upgrade."""
    packages = report.packages
    candidates, holds, settings = packages.candidates, packages.holds, packages.unattended
    for part in (candidates, holds):
        if isinstance(part, Unread):
            yield unread(part)
            return
    assert not isinstance(candidates, Unread) and not isinstance(holds, Unread)
    ours = [item for item in candidates if item.installed and _is_driver_or_kernel(item.package)]
    moving = [item for item in ours if item.candidate and item.candidate != item.installed and item.package not in holds]
    if not moving:
        yield ok(f"{len(ours)} driver and kernel packages, none would move")
        return
    alone = not isinstance(settings, Unread) and settings.enabled and packages.version("unattended-upgrades") is not None
    blacklist = () if isinstance(settings, Unread) else settings.blacklist
    tonight = [item for item in moving if alone and not any(_matches(pattern, item.package) for pattern in blacklist)]
    if tonight:
        yield fail("moves", *map(_told, tonight), names=_names(tonight))
    if rest := [item for item in moving if item not in tonight]:
        yield warn("would", *map(_told, rest), names=_names(rest))


def _is_driver_or_kernel(name: str) -> bool:
    return bool(re.search(r"nvidia|^libcuda|^cuda|^linux-(image|headers|modules|generic)", name))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _told(item: Candidate) -> str:
    return f"{item.package}: {item.installed} -> {item.candidate}"


def _names(items: Iterable[Candidate]) -> str:
    names = [item.package for item in items]
    return ", ".join(names[:4]) + (f" (+{len(names) - 4})" if len(names) > 4 else "")


# ------------------------------------------------------------------------------------------------ kernel, CUDA


@rule("audit.kernel", "kernel", "uname, grub.cfg, GRUB_DEFAULT, grubenv, the inventory")
def kernel(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The running kernel and that of the next boot are the pinned one."""
    if report.platform.kind == "container":
        return  # its kernel is its host's
    running, coming = report.kernel.release, report.kernel.next_boot
    if isinstance(running, Unread):
        yield unread(running)
        return
    if expected.kernel is None:
        if expected.kernel_series and not running.startswith(f"{expected.kernel_series}."):
            yield warn("series", f"running: {running}", running=running, wanted=expected.kernel_series)
        return
    evidence = (f"running: {running}", f"next boot: {coming.reason if isinstance(coming, Unread) else coming}")
    if running != expected.kernel:
        yield fail("running", *evidence, f"pinned: {expected.kernel}", running=running, wanted=expected.kernel)
    elif isinstance(coming, Unread):
        yield unread(coming, *evidence)
    elif coming != expected.kernel:
        yield fail("next-boot", *evidence, f"pinned: {expected.kernel}", coming=coming, wanted=expected.kernel)
    else:
        yield ok(*evidence)


@rule("audit.cuda", "driver", "folders /usr/local/cuda-*, the inventory and the lock")
def cuda(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The CUDA toolkit that the engine compiles with is there."""
    if expected.cuda_toolkit is None:
        return
    folders = report.system.cuda_folders
    if isinstance(folders, Unread):
        yield unread(folders)
        return
    found = f"found: {', '.join(folders) or 'none'}"
    there = any(folder.rstrip("/").endswith(f"cuda-{expected.cuda_toolkit}") for folder in folders)
    yield ok(found) if there else fail("missing", found, wanted=expected.cuda_toolkit)


# ------------------------------------------------------------------------------------------------ cards, caps


@rule("audit.cards", "cards", "PCI addresses and ids of sysfs; UUIDs and serial numbers of nvidia-smi; the inventory")
def card_places(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """Each card of the inventory is where it should be: not missing, not another one, not moved."""
    if not expected.cards or isinstance(report.gpus, Unread):
        return  # cards.present says that
    here = {gpu.address: gpu.id_text for gpu in report.gpus}
    shown = listed_cards(report)
    smi = {} if isinstance(shown, Unread) else {gpu.address: gpu for gpu in shown if gpu.address}
    for card in expected.cards:
        if card.bdf not in here:
            elsewhere = next((a for a, gpu in smi.items() if _same(gpu.uuid, card.uuid) or _same(gpu.serial, card.serial)), None)
            if elsewhere:
                yield fail("moved", f"{card.name} is at {elsewhere}", subject=card.name, seen=elsewhere)
            else:
                yield fail("missing", f"nothing at {card.name}; cards at: {', '.join(here) or 'none'}", subject=card.name)
            continue
        if here[card.bdf] != card.device_id and card.device_id:
            evidence = f"{card.name}: {here[card.bdf]}, not {card.device_id}"
            yield fail("other-kind", evidence, subject=card.name, seen=here[card.bdf], wanted=card.device_id)
            continue
        gpu = smi.get(card.bdf)
        if gpu is None or not (card.uuid or card.serial):
            yield ok(f"{card.name}: {here[card.bdf]}", subject=card.name)
            continue
        # A serial number is the board's own; a UUID is made of it. Where both are named, either tells.
        pairs = [(gpu.uuid, card.uuid), (gpu.serial, card.serial)]
        known = [(seen, want) for seen, want in pairs if want and not isinstance(seen, Unread) and not is_pseudonym(seen)]
        if any(str(seen).lower() != want.lower() for seen, want in known):
            at = next((a for a, other in smi.items() if _same(other.uuid, card.uuid) or _same(other.serial, card.serial)), None)
            evidence = f"{card.name}: {', '.join(f'{seen}, not {want}' for seen, want in known)}"
            if at:
                yield fail("moved", evidence, subject=card.name, seen=at)
            else:
                yield fail("swapped", evidence, subject=card.name)
        else:
            yield ok(f"{card.name}: {here[card.bdf]}", *(f"{seen}" for seen, _ in known), subject=card.name)


def _same(seen: Maybe[str], wanted: str) -> bool:
    return bool(wanted) and not isinstance(seen, Unread) and seen.lower() == wanted.lower()


@rule("audit.caps", "power", "nvidia-smi's power limit, the inventory's power_limit_w")
def caps(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The power cap is in force on every card: a card that was reset or fell off comes back without it."""
    if expected.power_limit_w is None or not cards(report):
        return
    shown = listed_cards(report)
    if isinstance(shown, Unread):
        yield unread(shown)
        return
    for gpu in shown:
        limit = gpu.power_limit_w
        where = gpu.address or "?"
        if isinstance(limit, Unread):
            yield unread(limit, subject=where)
        elif abs(limit - expected.power_limit_w) > 0.5:
            evidence = f"{where}: {limit:g} W"
            yield fail("other", evidence, subject=where, seen=f"{limit:g}", wanted=f"{expected.power_limit_w:g}")
        else:
            yield ok(f"{where}: {limit:g} W", subject=where)


# ------------------------------------------------------------------------------------------------ engine, model, serving


def _deployed(report: HostReport) -> Deployed | Unread:
    return report.deployed


@rule("audit.engine", "engine", "/opt/laoka/engines/current and its stamp, the lock")
def engine(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The engine in use is the locked release, made of the locked wheel."""
    if expected.engine is None:
        return
    deployed = _deployed(report)
    if isinstance(deployed, Unread):
        yield fail("none", deployed.reason, wanted=_pin(expected))
        return
    found = deployed.engine
    if isinstance(found, Unread):
        yield fail("unfinished", found.reason, wanted=_pin(expected))
    elif found is None:
        yield fail("none", f"{ENGINE} is not there", wanted=_pin(expected))
    elif found.name != expected.engine or (expected.engine_version and found.version != expected.engine_version):
        evidence = (f"in use: {found.name}=={found.version}", f"wanted: {_pin(expected)}")
        yield fail("other", *evidence, seen=f"{found.name}=={found.version}", wanted=_pin(expected))
    elif expected.wheel_sha256 and found.wheel_sha256 != expected.wheel_sha256:
        yield fail("other-wheel", f"made of {found.wheel_sha256}", f"locked: {expected.wheel_sha256}", wanted=_pin(expected))
    else:
        yield ok(f"{found.name}=={found.version}, wheel {found.wheel_sha256[:12]}")


def _pin(expected: Expected) -> str:
    return f"{expected.engine}=={expected.engine_version}" if expected.engine_version else str(expected.engine)


@rule("audit.kernels", "engine", "what the install proved of its own files: laoka-engine.json; the decision on speculation")
def kernels(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """DFlash2's kernels are proven where the lock serves with them."""
    deployed = _deployed(report)
    if isinstance(deployed, Unread) or isinstance(deployed.engine, Unread) or deployed.engine is None:
        return
    proof = deployed.engine.kernels
    wanted = (expected.speculative_method or "").startswith("dflash")
    if proof is None:
        if wanted:
            yield fail("not-proven", "the engine has no record of its kernels")
        return
    faults = [str(fault) for fault in proof.get("faults", ())]
    if proof.get("kind") == "none":
        yield fail("not-proven", f"{deployed.engine.name} has no such kernels") if wanted else ok("this engine needs none")
    elif proof.get("ok") is True:
        yield ok(f"proven: {proof.get('kind')}, {proof.get('version')}")
    elif wanted:
        yield fail("not-proven", *faults)
    else:
        yield warn("not-proven", *faults)


@rule("audit.speculative", "engine", "speculative.json on the host, the lock")
def speculative(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The host serves with the speculation that its lock fixes."""
    deployed = _deployed(report)
    if expected.speculative_method is None or isinstance(deployed, Unread):
        return
    decision = deployed.speculative
    if isinstance(decision, Unread):
        yield unread(decision)
    elif decision is None:
        yield warn("off", "no decision on the host", wanted=expected.speculative_method, reason="-")
    elif decision.get("method") != expected.speculative_method:
        reason = str(decision.get("reason", "-"))
        yield warn("off", f"in use: {decision.get('method')}: {reason}", wanted=expected.speculative_method, reason=reason)
    else:
        yield ok(f"in use: {decision.get('method')}")


@rule("audit.model", "model", "/srv/laoka/models/current, the inventory or the lock")
def model(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The model in use is the wanted one, at the wanted revision."""
    deployed = _deployed(report)
    if expected.model is not None and not isinstance(deployed, Unread):
        yield from _placed(deployed.model, MODEL, expected.model, expected.model_revision)
    elif expected.model is not None and isinstance(deployed, Unread):
        yield fail("none", deployed.reason, wanted=expected.model)


@rule("audit.drafter", "model", "/srv/laoka/models/drafter, the lock")
def drafter(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The drafter in use is the locked one, where the host serves with one."""
    deployed = _deployed(report)
    if expected.drafter is None or isinstance(deployed, Unread):
        return
    decision = deployed.speculative
    if deployed.drafter is None and isinstance(decision, dict) and not decision.get("method"):
        return  # audit.speculative says that it serves without
    yield from _placed(deployed.drafter, DRAFTER, expected.drafter, expected.drafter_revision)


def _placed(found: PlacedModel | None, link: str, repo: str, revision: str | None) -> Iterator[Outcome]:
    if found is None:
        yield fail("none", f"{link} is not there", wanted=repo)
    elif found.repo.lower() != repo.lower() and "/" in repo:
        yield fail("other", f"in use: {found.repo}", f"wanted: {repo}", seen=found.repo, wanted=repo)
    elif revision and found.revision != revision:
        evidence = (f"in use: {found.revision}", f"wanted: {revision}")
        yield fail("other-revision", *evidence, seen=found.revision[:12], wanted=revision[:12])
    else:
        yield ok(f"{found.repo} at {found.revision[:12]}")


@rule("audit.flags", "serve", "/etc/qwen-serve/vllm.yaml, the lock's serve_flags under the inventory's")
def flags(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The engine is started with the flags of lock and inventory."""
    deployed = _deployed(report)
    if not expected.flags:
        return
    if isinstance(deployed, Unread):
        yield fail("none", deployed.reason, subject="qwen-serve")
        return
    present = dict(deployed.flags)
    for unit, wanted in expected.flags.items():
        name = unit.removesuffix(".service")
        if unit not in present:
            yield fail("none", f"{name} has no flags on the host", subject=name)
            continue
        differ = [
            f"{key}: {_shown(present[unit].get(key))}, wanted {_shown(value)}"
            for key, value in wanted.items()
            if not is_pseudonym(present[unit].get(key)) and present[unit].get(key) != value
        ]
        yield warn("differ", *differ, subject=name, count=len(differ)) if differ else ok(f"{len(wanted)} flags", subject=name)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)[:60]


@rule("audit.units", "serve", "the hash of unit and settings that laoka notes when a unit started well")
def units(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """Unit files and settings are those that the last deploy wrote and started with."""
    deployed = _deployed(report)
    if isinstance(deployed, Unread):
        return
    if report.probe.is_root is not True:
        yield unread(Unread("some of the files are for root only"))
        return
    for unit in deployed.units:
        name = unit.unit.removesuffix(".service")
        if unit.as_started:
            yield ok(f"{name}: {len(unit.paths)} files as when it started", subject=name)
        else:
            yield warn("changed", *unit.paths, subject=name)


@rule("audit.serving", "serve", "systemd, and the readiness record that follows from a real completion")
def serving(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The model is served: the unit runs, and its last completion was a good one."""
    deployed = _deployed(report)
    if expected.model is None or isinstance(deployed, Unread):
        return
    unit = report.system.unit("qwen-serve.service")
    if unit is None or not unit.loaded:
        yield fail("no-unit", "qwen-serve.service is not there")
        return
    evidence = [f"qwen-serve.service: {unit.active}, {unit.enabled or 'not enabled'}, {unit.restarts or 0} restarts"]
    record = deployed.serving
    state = record.get("state") if isinstance(record, dict) else None
    if isinstance(record, dict):
        evidence.append(f"record: {state} {record.get('kind', '')} {record.get('detail', '')}".strip())
    if unit.active != "active":
        yield fail("down", *evidence, state=unit.active)
    elif state not in (None, "ready"):
        yield fail("down", *evidence, state=state)
    elif not (unit.enabled or "").startswith("enabled"):
        yield warn("not-at-boot", *evidence)
    else:
        yield ok(*evidence)


# ------------------------------------------------------------------------------------------------ watchdog, deploys


@rule("audit.watchdog", "watchdog", "systemd, /run/laoka/watchdog.json")
def watchdog(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The watchdog runs, writes its state, hears its sensors, and has no open incident."""
    deployed = _deployed(report)
    unit = report.system.unit("qwen-watchdog.service")
    if unit is None or isinstance(deployed, Unread) or not unit.loaded:
        yield fail("none", "qwen-watchdog.service is not there")
        return
    evidence = f"qwen-watchdog.service: {unit.active}, {unit.enabled or 'not enabled'}"
    state = deployed.watchdog
    if unit.active != "active":
        yield fail("down", evidence)
        return
    if isinstance(state, Unread) or state is None:
        yield fail("silent", evidence, "no state file" if state is None else state.reason)
        return
    now_s = report.probe.epoch_s
    if not isinstance(now_s, Unread) and abs(now_s - state.written_unix_s) > STATE_MAX_AGE_S:
        yield fail("silent", evidence, f"state written {now_s - state.written_unix_s:.0f} s ago")
        return
    real = [item for item in state.open if not item.drill]
    for item in real:
        words = f"{item.kind} ({item.severity}): {item.card}"
        yield fail("incident", words, item.next, subject=item.id, kind=item.kind, card=item.card)
    blind = [name for name, verdict in state.sensors if verdict == "unknown"]
    if blind:
        yield warn("blind", evidence, sensors=", ".join(blind))
    if not real and not blind:
        yield ok(evidence, f"{len(state.sensors)} sensors, no open incident")
    past = [item for item in state.recent if not item.drill]
    if not isinstance(now_s, Unread):
        past = [item for item in past if now_s - item.opened_unix_s <= RECENT_S]
    if past:
        yield info("recent", *(f"{item.kind}: {item.card} [{item.id}]" for item in past), count=len(past))


@rule("audit.alerts", "watchdog", "/run/laoka/watchdog.json, and the record of the last `laoka watchdog test-alert`")
def alerts(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """Alerts have somewhere to go, and were proven to arrive not long ago."""
    deployed = _deployed(report)
    if isinstance(deployed, Unread) or isinstance(deployed.watchdog, Unread) or deployed.watchdog is None:
        return  # audit.watchdog says so
    state, test = deployed.watchdog, deployed.alert_test
    if not state.channels:
        yield warn("no-channel", "no address in /etc/laoka/alert-urls")
        return
    if state.failing:
        yield fail("failing", *state.failing)
    now_s = report.probe.epoch_s
    if isinstance(test, Unread):
        yield unread(test)
    elif test is None:
        yield warn("never", f"{state.channels} channels, never tested")
    elif test.failed or not test.delivered:
        yield fail("failed", f"last test: {test.delivered} delivered, {test.failed} failed")
    elif not isinstance(now_s, Unread) and now_s - test.unix_s > ALERT_TEST_MAX_AGE_S:
        days = int((now_s - test.unix_s) / DAY_S)
        yield warn("old", f"last test: {days} days ago", days=days)
    else:
        yield ok(f"{state.channels} channels, {test.delivered} delivered in the last test")


@rule("audit.deploy", "deploys", "/var/lib/laoka/deploys: the lock and the ledger")
def deploy(report: HostReport, expected: Expected) -> Iterator[Outcome]:
    """The last deploy came to its end."""
    deployed = _deployed(report)
    if isinstance(deployed, Unread) or not deployed.deploys:
        return
    last = deployed.deploys[-1]
    evidence = f"{last.what} by {last.who}"
    if last.outcome == "done":
        yield ok(evidence)
    elif last.outcome == "running":
        yield info("running", evidence, who=last.who, what=last.what)
    else:
        yield warn("interrupted", evidence, who=last.who, what=last.what)


def rule_ids() -> tuple[str, ...]:
    """Every id that an audit's finding can have, for policies."""
    return (*RULES, *AUDITED_CHECKS)
