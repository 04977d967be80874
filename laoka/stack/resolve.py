"""The resolver: cards, system, model and wishes -> one pinned Stack, or a Refusal with every reason and a way out. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from laoka.catalog import drivers as driver_catalogue
from laoka.catalog.advisories import advisories
from laoka.catalog.drivers import DriverBranch, KernelFact, OsRelease, PackageSource
from laoka.catalog.engines import UNVERIFIED, Engine, engines
from laoka.catalog.gpus import Flavour, Gpu, gpus
from laoka.catalog.models import Drafter, drafters
from laoka.catalog.profiles import Profile, Speculative, verdicts
from laoka.stack import speed
from laoka.stack.driver_target import package_names
from laoka.stack.message import InBoth, Message, Violation, message
from laoka.stack.plan import GIB, SCORE_BLOCK_TOKENS, Load, MemoryPlan, fitting_plan, memory_plan
from laoka.stack.request import Card, Request, RequestError, engine_names, groups
from laoka.stack.weights import resident_linear

MTP_TOKENS = 4
DEGREES = (8, 4, 2, 1)
RELEASE_BLOCK, RELEASE_MAMBA_BLOCK = 2048, 8192


@dataclass(frozen=True)
class Stack:
    """Everything that is pinned for one group of cards."""

    gpu: str | None
    gpu_count: int
    tensor_parallel: int
    os_release: str
    driver_branch: str | None
    driver_version: str | None
    module_flavour: Flavour | None
    driver_source: str | None
    """Id of the catalogue's package source."""
    driver_packages: tuple[str, ...]
    """Of the first choice of modules; `{kernel}` where the kernel was not named exactly."""
    kernel_series: str | None
    cuda_toolkit: str | None
    engine: Engine
    engine_listed: bool
    wheel_sha256: str | None
    """None: not known; a lock is not written with it."""
    python: str
    python_source: str
    """"system" when the release has it, else "uv"."""
    quantisation: str
    model_name: str
    model_repo: str
    model_revision: str | None
    speculative: Speculative
    speculative_method: str | None
    """As the engine's command line calls it."""
    speculative_tokens: int
    speculative_reason: Message
    """Why it is this one, and not more."""
    speculative_fallback: Speculative
    """What fits as well, for a host that turns out not to have what `speculative` needs."""
    drafter: Drafter | None
    kv_cache_dtype: str
    serve_flags: dict[str, str]
    serve_env: dict[str, str]
    memory: MemoryPlan
    profiles: tuple[Profile, ...]
    ceilings: speed.Ceilings | None
    warnings: tuple[Message, ...]


@dataclass(frozen=True)
class Refusal:
    """Why nothing was resolved: every violated constraint, and the memory plan where one could be made."""

    violations: tuple[Violation, ...]
    memory: MemoryPlan | None = None


@dataclass(frozen=True)
class _Driver:
    branch: str
    version: str | None
    flavour: Flavour
    source: PackageSource
    packages: tuple[str, ...]
    kernel_series: str | None
    warnings: tuple[Message, ...]


def resolve(request: Request) -> Stack | Refusal:
    """Resolve a request against the catalogue.

    Returns a Stack that satisfies every constraint, or a Refusal that lists all that are violated, each with its evidence and
    a way out. Errors: RequestError for what is not a request at all (an unknown release, a context of no tokens).
    """
    release = _release(request)
    if request.context_tokens < 1 or request.streams < 1:
        raise RequestError(f"context {request.context_tokens} and streams {request.streams}: both are at least 1")
    violations = [*_card_violations(request.cards), *_model_violations(request), *_config_violations(request)]
    driver: _Driver | None = None
    if request.cards and not violations:
        found = _driver(request, release)
        if isinstance(found, _Driver):
            driver = found
        else:
            violations += found
    groups_of_cards = groups(request.cards) or ((),)
    refusals: list[Refusal] = []
    for group in groups_of_cards:
        if any(card.gpu is None for card in group):
            continue
        outcome = _serve(request, release, group, driver)
        if isinstance(outcome, Stack) and not violations:
            idle = len(request.cards) - len(group)
            if idle:
                outcome = replace(outcome, warnings=(*outcome.warnings, message("warn_other_cards", count=idle, gpu=outcome.gpu)))
            return outcome
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        else:
            refusals.append(Refusal((), outcome.memory))
    memory = next((refusal.memory for refusal in refusals if refusal.memory), None)
    every = (*violations, *(violation for refusal in refusals for violation in refusal.violations))
    return Refusal(tuple(dict.fromkeys(every)), memory)


# --- cards, model, configuration -------------------------------------------------------------------------------------------


def _release(request: Request) -> OsRelease:
    release = driver_catalogue.release(request.os_release)
    if release is None:
        known = ", ".join(row.id for row in driver_catalogue.releases())
        raise RequestError(f"release {request.os_release!r} is not in the catalogue; known: {known}")
    return replace(release, glibc=request.glibc or release.glibc, python=request.python or release.python)


def _card_violations(cards: Sequence[Card]) -> list[Violation]:
    unknown = sorted({card.device_id for card in cards if card.gpu is None})
    return [Violation("gpu", message("evidence_unknown_gpu", device_id=name), message("way_unknown_gpu")) for name in unknown]


def _model_violations(request: Request) -> list[Violation]:
    arch = request.checkpoint.architecture
    if request.context_tokens <= arch.max_position:
        return []
    evidence = message("evidence_context", wanted=request.context_tokens, most=arch.max_position, model=request.checkpoint.name)
    return [Violation("context", evidence, message("way_context", most=arch.max_position))]


def _config_violations(request: Request) -> list[Violation]:
    config = request.speculative_config
    if config is None:
        return []
    return list(speculative_config_violations(config))


def speculative_config_violations(config: object) -> tuple[Violation, ...]:
    """What is wrong with a --speculative-config that somebody wrote himself.

    There is no method "dflash2": the engine knows "dflash", and takes DFlash2 from the drafter's architecture.
    """
    method = config.get("method") if isinstance(config, dict) else None
    if not isinstance(method, str):
        shown = json.dumps(config, default=str)[:80]
        return (Violation("speculative-config", message("evidence_spec_config", config=shown), message("way_spec_config")),)
    if method.lower() in ("dflash2", "dflash-2", "dflash_2"):
        return (Violation("speculative-config", message("evidence_spec_dflash2", method=method), message("way_spec_dflash2")),)
    if method not in ("dflash", "mtp", "eagle", "eagle3", "ngram", "draft_model", "dspark"):
        return (Violation("speculative-config", message("evidence_spec_method", method=method), message("way_spec_config")),)
    if method == "dflash" and not config.get("model"):  # type: ignore[attr-defined]
        return (Violation("speculative-config", message("evidence_spec_no_drafter"), message("way_spec_dflash2")),)
    return ()


# --- driver ----------------------------------------------------------------------------------------------------------------


def _driver(request: Request, release: OsRelease) -> _Driver | list[Violation]:
    """The driver that drives every card of the host, or all that forbids one."""
    cards = [card.gpu for card in request.cards if card.gpu is not None]
    found: list[Violation] = []
    flavours = [set(gpu.module_flavours) for gpu in cards]
    common = set.intersection(*flavours)
    last = min((gpu.last_driver_branch for gpu in cards if gpu.last_driver_branch is not None), default=None)
    first = max((gpu.first_driver_branch for gpu in cards if gpu.first_driver_branch is not None), default=None)
    if not common:
        closed = sorted({gpu.name for gpu in cards if gpu.module_flavours == ("proprietary",)})
        opened = sorted({gpu.name for gpu in cards if gpu.module_flavours == ("open",)})
        evidence = message("evidence_mixed_modules", proprietary=", ".join(closed), open=", ".join(opened))
        found.append(Violation("module-flavour", evidence, message("way_mixed_modules")))
    wish = request.driver
    oldest = next((gpu for gpu in cards if gpu.last_driver_branch == last), cards[0])
    if wish is not None:
        if wish.open and "open" not in set.intersection(*flavours):
            closed_card = next(gpu for gpu in cards if "open" not in gpu.module_flavours)
            evidence = message("evidence_open_module", package=wish.text, gpu=closed_card.name)
            found.append(Violation("module-flavour", evidence, message("way_open_module")))
        if wish.branch is None:
            found.append(
                Violation("driver", message("evidence_driver_unpinned", package=wish.text), message("way_driver_unpinned"))
            )
        elif wish.branch not in {branch.id for branch in driver_catalogue.branches()}:
            known = ", ".join(branch.id for branch in driver_catalogue.branches())
            found.append(
                Violation(
                    "driver", message("evidence_driver_unknown", branch=wish.branch), message("way_driver_unknown", known=known)
                )
            )
    wanted = int(wish.branch) if wish is not None and wish.branch is not None else None
    if wanted is not None and last is not None and wanted > last:
        evidence = message("evidence_driver_dropped", branch=wanted, gpu=oldest.name, last=last)
        found.append(Violation("driver", evidence, message("way_driver_dropped", last=last)))
    if wanted is not None and first is not None and wanted < first:
        youngest = next(gpu for gpu in cards if gpu.first_driver_branch == first)
        evidence = message("evidence_driver_too_old", branch=wanted, gpu=youngest.name, first=first)
        found.append(Violation("driver", evidence, message("way_driver_too_old", first=first)))
    if first is not None and last is not None and first > last:
        found.append(
            Violation("driver", message("evidence_no_common_branch", first=first, last=last), message("way_mixed_modules"))
        )
    if not any(release.id in source.releases for source in driver_catalogue.package_sources()):
        found.append(
            Violation("driver-packages", message("evidence_no_packages", release=release.name), message("way_no_packages"))
        )
    if found:
        return found
    branch = _branch(wanted, first, last)
    if branch is None:
        return [Violation("driver", message("evidence_no_branch"), message("way_driver_dropped", last=last or 0))]
    flavour: Flavour = "open" if common == {"open"} or (wish is not None and wish.open) else "proprietary"
    return _pin_driver(request, release, branch, flavour)


def _branch(wanted: int | None, first: int | None, last: int | None) -> DriverBranch | None:
    """The wanted branch, or the newest maintained one in range that versions are known of, long-term ones first."""
    rows = [
        row
        for row in driver_catalogue.branches()
        if (first is None or row.number >= first)
        and (last is None or row.number <= last)
        and (wanted is None or row.number == wanted)
    ]
    if wanted is not None:
        return rows[0] if rows else None
    kept = [row for row in rows if not row.ended and row.validated]
    return max(kept, key=lambda row: (row.kind == "LTS", row.number), default=None)


def _pin_driver(request: Request, release: OsRelease, branch: DriverBranch, flavour: Flavour) -> _Driver | list[Violation]:
    wish = request.driver
    source = driver_catalogue.package_source(release.id, branch.id, request.driver_source)
    if source is None:
        evidence = message("evidence_no_packages_branch", release=release.name, branch=branch.id)
        return [Violation("driver-packages", evidence, message("way_no_packages_branch"))]
    series = request.kernel or (release.kernel_series[0] if release.kernel_series else None)
    versions = (wish.version,) if wish is not None and wish.version else tuple(reversed(branch.validated or branch.versions))
    bad = {version: fact for version in versions if (fact := _kernel_fact(version, series, works=False))}
    usable = [version for version in versions if version not in bad]
    if versions and not usable:
        fact = next(iter(bad.values()))
        evidence = message("evidence_kernel", driver=fact.driver, kernel=fact.kernel, source=fact.source)
        return [Violation("kernel", evidence, message("way_kernel", series=", ".join(release.kernel_series) or "?"))]
    warnings = []
    if branch.ended:
        warnings.append(message("warn_branch_ended", branch=branch.id, eol=branch.eol or "?"))
    known = series is not None and (
        _kernel_fact(branch.id, series, works=True) or any(_kernel_fact(version, series, works=True) for version in usable)
    )
    if not known:
        warnings.append(message("warn_kernel_unproven", branch=branch.id, kernel=series or "?"))
    if wish is not None and wish.version and wish.version not in branch.versions:
        warnings.append(message("warn_driver_unseen", version=wish.version))
    if not source.verified:
        warnings.append(message("warn_packages_unverified", release=release.name))
    packages = package_names(source, branch.id, flavour, request.kernel)
    return _Driver(branch.id, usable[0] if usable else None, flavour, source, packages, series, tuple(warnings))


def _kernel_fact(driver: str, kernel: str | None, *, works: bool) -> KernelFact | None:
    for fact in driver_catalogue.kernel_facts():
        fits = kernel is not None and (kernel == fact.kernel or kernel.startswith((f"{fact.kernel}.", f"{fact.kernel}-")))
        if fact.works is works and fact.driver == driver and fits:
            return fact
    return None


# --- engine ----------------------------------------------------------------------------------------------------------------


def _serve(request: Request, release: OsRelease, group: Sequence[Card], driver: _Driver | None) -> Stack | Refusal:
    """The engine for one kind of card: the best without a violation, or what forbids each."""
    gpu = group[0].gpu if group else None
    reasons: dict[str, tuple[Violation, ...]] = {}
    best_memory: MemoryPlan | None = None
    skipped: list[str] = []
    full: set[str] = set()
    for engine, listed in _candidates(request, gpu):
        if engine.name in full:
            continue
        found = _engine_violations(request, release, engine, gpu, len(group), driver)
        auto_hash = request.engine_version is None and _hash(engine, request) is None
        if not found and auto_hash and _hash_elsewhere(request, engine):
            skipped.append(engine.pin)
            continue
        if not found:
            made = _stack(request, release, engine, listed, group, driver)
            if isinstance(made, Stack):
                notes = _notes(reasons, engine)
                if skipped:
                    notes.insert(0, message("note_unverified", engine=", ".join(skipped)))
                return replace(made, warnings=(*made.warnings, *notes))
            if best_memory is None:
                best_memory = made.memory
            found = list(made.violations)
            # An older release with other defaults is no cure for a card that is too small.
            full.add(engine.name)
        kept = reasons.get(engine.name)
        if kept is None or len(found) < len(kept):
            reasons[engine.name] = tuple(found)
    every = tuple(dict.fromkeys(violation for why in reasons.values() for violation in why))
    return Refusal(every, best_memory)


def _notes(reasons: dict[str, tuple[Violation, ...]], engine: Engine) -> list[Message]:
    """Why engines that are preferred to the chosen one were passed over."""
    order = engine_names()
    before = order[: order.index(engine.name)] if engine.name in order else ()
    return [why.evidence for name in before for why in reasons.get(name, ())[:1]]


def _candidates(request: Request, gpu: Gpu | None) -> list[tuple[Engine, bool]]:
    """(engine, is it listed): what was asked for, or every engine for this card, preferred names and newest first.

    Without a wish, engines that have no code for the card or don't know its quantisation there are left out, unless that
    leaves none: then all are told why.
    """
    rows = [engine for engine in engines() if engine.kind == "vllm"]
    if request.engine is not None:
        rows = [engine for engine in rows if engine.name == request.engine]
        if request.engine_version is not None:
            exact = [engine for engine in rows if engine.version == request.engine_version]
            return [(engine, True) for engine in exact] or [(unlisted(rows, request.engine_version), False)]
    else:
        rows = [engine for engine in rows if engine.device == ("cpu" if gpu is None else "cuda")]
        scheme = request.checkpoint.scheme
        fitting = [row for row in rows if gpu is not None and gpu.sm in row.sm and row.quantisations.get(scheme, 999) <= gpu.sm]
        rows = fitting or rows
    order = {name: place for place, name in enumerate(engine_names())}
    rows.sort(key=lambda engine: Version(engine.version), reverse=True)
    rows.sort(key=lambda engine: order[engine.name])
    return [(engine, True) for engine in rows]


def unlisted(rows: Sequence[Engine], version: str) -> Engine:
    """A release that the catalogue does not have, from the newest listed one that is not newer than it.

    Its requirements are assumed to be that one's; its hash has to come from its own SHA256SUMS. Errors: RequestError for a
    version that is none.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise RequestError(f"engine version {version!r} is not a version, such as 1.5.1") from None
    older = [row for row in rows if Version(row.version) <= wanted] or [min(rows, key=lambda row: Version(row.version))]
    near = max(older, key=lambda row: Version(row.version))

    def moved(text: str | None) -> str | None:
        return text.replace(near.version, version) if text else None

    return replace(
        near, id=f"{near.name}-{version}", version=version, requirements_read=False, wheel_sha256=UNVERIFIED, wheel_bytes=None,
        wheel_file=moved(near.wheel_file), wheel_url=moved(near.wheel_url), sums_url=moved(near.sums_url), known_bad=None,
        kv_overhead=1.0, source=f"not in the catalogue; requirements of {near.pin} assumed", notes="",
    )  # fmt: skip


def _hash(engine: Engine, request: Request) -> str | None:
    """The wheel's hash: what the release's own SHA256SUMS said, or the catalogue's."""
    told = request.hashes.get(engine.pin)
    return told or (None if engine.wheel_sha256 == UNVERIFIED else engine.wheel_sha256)


def _hash_elsewhere(request: Request, engine: Engine) -> bool:
    return any(row.name == engine.name and _hash(row, request) for row in engines())


def _engine_violations(
    request: Request, release: OsRelease, engine: Engine, gpu: Gpu | None, count: int, driver: _Driver | None
) -> list[Violation]:
    """Every constraint of this engine that is not met."""
    found: list[Violation] = []
    add = found.append
    scheme = request.checkpoint.scheme
    if engine.device == "cuda" and gpu is None:
        add(Violation("gpu", message("evidence_no_gpu", engine=engine.pin), message("way_no_gpu")))
    if engine.device == "cuda" and gpu is not None:
        if gpu.sm not in engine.sm:
            evidence = message("evidence_sm", engine=engine.pin, gpu=gpu.name, sm=gpu.sm, sms=", ".join(map(str, engine.sm)))
            add(Violation("compute-capability", evidence, _engine_for(gpu)))
        if driver is not None and engine.driver_min is not None and int(driver.branch) < engine.driver_min:
            evidence = message("evidence_engine_driver", engine=engine.pin, branch=driver.branch, least=engine.driver_min)
            add(Violation("driver", evidence, message("way_engine_driver", least=engine.driver_min)))
    least = engine.quantisations.get(scheme)
    if least is None and engine.device == "cpu":
        add(Violation("quantisation", message("evidence_scheme_cpu", engine=engine.pin, scheme=scheme), message("way_scheme_cpu")))
    elif least is None:
        evidence = message("evidence_scheme", engine=engine.pin, scheme=scheme, known=", ".join(sorted(engine.quantisations)))
        add(Violation("quantisation", evidence, message("way_scheme")))
    elif gpu is not None and engine.device == "cuda" and gpu.sm < least:
        evidence = message("evidence_scheme_sm", engine=engine.pin, scheme=scheme, least=least, gpu=gpu.name, sm=gpu.sm)
        add(Violation("quantisation", evidence, _engine_for(gpu)))
    if release.glibc is None:
        add(
            Violation(
                "glibc", message("evidence_glibc_unknown", engine=engine.pin, least=engine.glibc_min), message("way_glibc_unknown")
            )
        )
    elif engine.glibc_min is not None and _newer(engine.glibc_min, release.glibc):
        evidence = message("evidence_glibc", engine=engine.pin, least=engine.glibc_min, release=release.name, glibc=release.glibc)
        way = "way_glibc" if engine.name == "1cat-vllm" else "way_glibc_upgrade"
        add(Violation("glibc", evidence, message(way)))
    if engine.known_bad:
        add(
            Violation(
                "engine",
                message("evidence_known_bad", engine=engine.pin, why=engine.known_bad),
                message("way_known_bad", name=engine.name),
            )
        )
    for advisory in advisories():
        if advisory.action != "refuse" or advisory.engine != engine.name:
            continue
        if _matches(engine.version, advisory.versions):
            evidence = message(
                "evidence_advisory", engine=engine.pin, title=InBoth(advisory.title, advisory.title_zh), id=advisory.id
            )
            add(Violation("advisory", evidence, message("way_advisory", versions=advisory.versions)))
    degree = tensor_parallel(request, count)
    if degree in engine.bad_tensor_parallel:
        add(
            Violation(
                "tensor-parallel",
                message("evidence_bad_tp", engine=engine.pin, tp=degree),
                message("way_known_bad", name=engine.name),
            )
        )
    model = request.checkpoint.model
    if (
        gpu is not None
        and engine.device == "cuda"
        and model is not None
        and model.min_gpu_memory_mib
        and (gpu.memory_mib or 0) < model.min_gpu_memory_mib
    ):
        evidence = message(
            "evidence_model_card",
            model=model.id,
            least=model.min_gpu_memory_mib,
            gpu=gpu.name,
            memory=gpu.memory_mib or 0,
            source=model.source,
        )
        add(Violation("model", evidence, message("way_model_card")))
    found += _speculative_violations(request, engine)
    return found


def _engine_for(gpu: Gpu) -> Message:
    """A way out for a card that an engine does not serve."""
    if gpu.sm == 70:
        return message("way_sm70")
    if gpu.sm < 70:
        return message("way_before_volta")
    return message("way_upstream")


def _speculative_violations(request: Request, engine: Engine) -> list[Violation]:
    wish, model, found = request.speculative, request.checkpoint.model, []
    if wish == "dflash2":
        if engine.speculation != "dflash2":
            found.append(Violation("speculative", message("evidence_no_dflash2", engine=engine.pin), message("way_no_dflash2")))
        if model is None or model.drafter is None:
            key = "evidence_lm_head" if model is not None and model.lm_head == "nvfp4" else "evidence_no_drafter"
            found.append(Violation("speculative", message(key, model=request.checkpoint.name), message("way_no_drafter")))
    if wish == "mtp" and (not engine.mtp or not request.checkpoint.architecture.mtp_layers):
        evidence = message("evidence_no_mtp", engine=engine.pin, model=request.checkpoint.name)
        found.append(Violation("speculative", evidence, message("way_no_mtp")))
    return found


def _newer(wanted: str, present: str) -> bool:
    try:
        return Version(wanted) > Version(present)
    except InvalidVersion:
        return True


def _matches(version: str, specifier: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


def tensor_parallel(request: Request, count: int) -> int:
    """The largest degree that the cards and the model's heads allow: a power of two that divides query and KV heads.

    KV heads fewer than the degree are repeated by the engine, so a degree that they divide will do.
    """
    arch = request.checkpoint.architecture
    for degree in DEGREES:
        heads = arch.heads % degree == 0 and (arch.kv_heads % degree == 0 or degree % arch.kv_heads == 0)
        gdn = arch.gdn_key_heads % degree == 0 and arch.gdn_value_heads % degree == 0
        if degree <= count and heads and gdn:
            return degree
    return 1


# --- the stack -------------------------------------------------------------------------------------------------------------


def _stack(
    request: Request, release: OsRelease, engine: Engine, listed: bool, group: Sequence[Card], driver: _Driver | None
) -> Stack | Refusal:
    """The stack of this engine, or a refusal when it does not fit."""
    gpu = group[0].gpu if group else None
    degree = tensor_parallel(request, len(group)) if engine.device == "cuda" else 1
    if engine.device == "cuda" and engine.tensor_parallel:
        degree = max((known for known in engine.tensor_parallel if known <= degree), default=degree)
    warnings: list[Message] = list(driver.warnings) if driver is not None else []
    chosen, drafter, tokens, memory, why = _speculate(request, engine, gpu, degree)
    if request.speculative == "auto" and chosen != "dflash2" and engine.device == "cuda":
        warnings.append(why)
    if memory.fits is False:
        return Refusal((_memory_violation(request, engine, gpu, degree, memory),), memory)
    sha256 = _hash(engine, request)
    if not listed:
        warnings.append(message("warn_unlisted", engine=engine.pin, source=engine.source))
    elif not engine.requirements_read:
        warnings.append(message("warn_requirements_unread", engine=engine.pin))
    if engine.device == "cuda" and memory.fits is None:
        warnings.append(message("warn_memory_unknown"))
    if engine.device == "cuda" and gpu is not None and gpu.family != "volta":
        warnings.append(message("warn_fitted_elsewhere", gpu=gpu.name))
    if sha256 is None:
        warnings.append(message("warn_no_hash", engine=engine.pin))
    if engine.name == "revolta":
        warnings.append(message("warn_revolta_gate", engine=engine.pin))
    if engine.device == "cuda" and degree < len(group):
        warnings.append(message("warn_idle_cards", used=degree, count=len(group)))
    if memory.load.language_model_only:
        warnings.append(message("warn_language_only"))
    if request.checkpoint.model is not None and request.checkpoint.model.bytes_total is None:
        warnings.append(message("warn_size_computed", model=request.checkpoint.model.id))
    profiles = speed.profiles_for(gpu, degree, engine, request.checkpoint.name, chosen)
    warnings += _experience(request, engine, gpu, degree, chosen, profiles)
    python, origin = _python(engine, release)
    model = request.checkpoint.model
    return Stack(
        gpu=gpu.id if gpu else None, gpu_count=len(group), tensor_parallel=degree, os_release=release.id,
        driver_branch=driver.branch if driver else None, driver_version=driver.version if driver else None,
        module_flavour=driver.flavour if driver else None, driver_source=driver.source.id if driver else None,
        driver_packages=driver.packages if driver else (),
        kernel_series=driver.kernel_series if driver else None, cuda_toolkit=engine.cuda_toolkit,
        engine=engine, engine_listed=listed, wheel_sha256=sha256, python=python, python_source=origin,
        quantisation=engine.quantisation_path.get(request.checkpoint.scheme, request.checkpoint.scheme),
        model_name=request.checkpoint.name, model_repo=model.repo if model else request.checkpoint.name,
        model_revision=model.revision if model else None, speculative=chosen,
        speculative_method={"dflash2": "dflash", "mtp": "mtp", "none": None}[chosen], speculative_tokens=tokens,
        speculative_reason=why, speculative_fallback=_fallback(request, engine, gpu, degree, chosen, memory), drafter=drafter,
        kv_cache_dtype=memory.load.kv_cache_dtype,
        serve_flags=_flags(engine, memory, degree, chosen, drafter, tokens, gpu),
        serve_env=_env(engine, memory), memory=memory,
        profiles=profiles,
        ceilings=speed.ceilings(gpu, degree, request.checkpoint, memory.load, drafter) if engine.device == "cuda" else None,
        warnings=tuple(warnings),
    )  # fmt: skip


def _experience(
    request: Request, engine: Engine, gpu: Gpu | None, degree: int, chosen: Speculative, measured: Sequence[Profile]
) -> list[Message]:
    """What others met on such a setup: verdicts against it, hazards, and that nobody tried it."""
    found = []
    for verdict in verdicts():
        alike = verdict.engine.split("==")[0] == engine.name and verdict.model == request.checkpoint.name
        if alike and gpu is not None and verdict.gpu == gpu.id and verdict.count == degree and verdict.speculative == chosen:
            beyond = request.context_tokens >= verdict.context_tokens and request.streams >= verdict.streams
            if not verdict.fits and beyond:
                found.append(message("warn_reported", context=verdict.context_tokens, source=verdict.source))
    for advisory in advisories():
        concerned = advisory.action == "advise" and advisory.engine == engine.name and degree >= advisory.min_tensor_parallel
        if concerned and _matches(engine.version, advisory.versions):
            found.append(message("warn_advisory", id=advisory.id, known=InBoth(advisory.known, advisory.known_zh)))
    here = [profile for profile in measured if gpu is not None and profile.gpu == gpu.id and profile.works]
    if engine.gate and engine.name == "1cat-vllm" and not here:
        found.append(message("warn_gate", engine=engine.pin, gate=engine.gate))
    return found


def _speculate(
    request: Request, engine: Engine, gpu: Gpu | None, degree: int
) -> tuple[Speculative, Drafter | None, int, MemoryPlan, Message]:
    """Which speculation, its drafter and tokens, the plan with it, and why.

    "auto" is DFlash2 where engine, model and memory allow it, else MTP where they do, else none. What others are known to run
    without speculation, and nobody with MTP, is left so: a sum alone does not outweigh that.
    """
    model, wish = request.checkpoint.model, request.speculative
    drafter = drafters()[model.drafter] if model is not None and model.drafter else None
    if engine.device == "cpu":
        return "none", None, 0, _plan(request, engine, gpu, degree, "none", 0, None), message("why_cpu", engine=engine.pin)
    why = message("why_wished", wish=wish)
    if wish == "dflash2" or (wish == "auto" and engine.speculation == "dflash2" and drafter is not None):
        tokens = (drafter.speculative_tokens or 0) if drafter else 0
        memory = _plan(request, engine, gpu, degree, "dflash2", tokens, drafter)
        if wish == "dflash2" or memory.fits:
            held = f"{memory.line('drafter').bytes / GIB:.2f}"
            return "dflash2", drafter, tokens, memory, message("why_fits", gib=held, tp=degree, context=request.context_tokens)
        key = "why_no_room" if memory.fits is False else "why_memory_unknown"
        why = message(key, tp=degree)
    elif wish == "auto":
        key = "why_engine" if engine.speculation != "dflash2" else "why_model"
        why = message(key, engine=engine.pin, model=request.checkpoint.name)
    if wish == "mtp" or (wish == "auto" and _has_mtp(request, engine)):
        memory = _plan(request, engine, gpu, degree, "mtp", MTP_TOKENS, None)
        if wish == "mtp":
            return "mtp", None, MTP_TOKENS, memory, why
        if memory.fits and _runs_without(request, gpu, degree):
            why = message("why_mtp_untried", why=why)
        elif memory.fits:
            return "mtp", None, MTP_TOKENS, memory, message("why_mtp_instead", why=why)
        else:
            why = message("why_no_mtp_room", why=why)
    return "none", None, 0, _plan(request, engine, gpu, degree, "none", 0, None), why


def _has_mtp(request: Request, engine: Engine) -> bool:
    return engine.mtp and request.checkpoint.architecture.mtp_layers > 0


def _runs_without(request: Request, gpu: Gpu | None, degree: int) -> bool:
    """Whether others run this load on like cards without speculation, and nobody is known to with MTP."""
    cards = {row.id: row for row in gpus()}
    like = [
        verdict.speculative
        for verdict in verdicts()
        if verdict.fits and verdict.model == request.checkpoint.name and verdict.count == degree and gpu is not None
        and (cards[verdict.gpu].sm, cards[verdict.gpu].memory_mib) == (gpu.sm, gpu.memory_mib)
        and verdict.context_tokens >= request.context_tokens and verdict.streams >= request.streams
    ]  # fmt: skip
    return "none" in like and "mtp" not in like


def _fallback(
    request: Request, engine: Engine, gpu: Gpu | None, degree: int, chosen: Speculative, memory: MemoryPlan
) -> Speculative:
    """MTP where it fits with the very batch and utilization that were chosen for DFlash2, else none."""
    if chosen != "dflash2" or not _has_mtp(request, engine) or gpu is None:
        return "none"
    plan = memory_plan(
        weights=request.checkpoint.weights, arch=request.checkpoint.architecture, engine=engine,
        load=replace(memory.load, speculative="mtp", speculative_tokens=MTP_TOKENS), memory_mib=gpu.memory_mib,
        tensor_parallel=degree, utilization=memory.utilization,
    )  # fmt: skip
    return "mtp" if plan.fits else "none"


def _plan(
    request: Request, engine: Engine, gpu: Gpu | None, degree: int, chosen: Speculative, tokens: int, drafter: Drafter | None
) -> MemoryPlan:
    """The memory plan; when it does not fit with the vision tower it is tried without."""
    load = Load(
        request.context_tokens, request.streams, chosen, tokens, engine.default_batched_tokens, engine.kv_cache_dtype or "auto"
    )
    memory_mib = gpu.memory_mib if gpu is not None and engine.device == "cuda" else None
    plans = []
    for language_only in (False, True):
        plan = fitting_plan(
            weights=request.checkpoint.weights, arch=request.checkpoint.architecture, engine=engine,
            load=replace(load, language_model_only=language_only), memory_mib=memory_mib, tensor_parallel=degree, drafter=drafter,
        )  # fmt: skip
        plans.append(plan)
        if plan.fits is not False or not request.checkpoint.weights.vision:
            return plan
    return plans[0]


def _memory_violation(request: Request, engine: Engine, gpu: Gpu | None, degree: int, memory: MemoryPlan) -> Violation:
    """That it does not fit: by the weights alone or by the sum; with the fewest cards that would do."""
    assert gpu is not None and gpu.memory_mib is not None  # without a known memory nothing is said not to fit
    weights = request.checkpoint.weights
    loaded = weights.embedding + weights.lm_head + resident_linear(weights, engine)
    values = {
        "gpu": gpu.name, "memory": round(gpu.memory_mib / 1024), "tp": degree, "scheme": request.checkpoint.scheme,
        "path": engine.quantisation_path.get(request.checkpoint.scheme, "-"),
    }  # fmt: skip
    if loaded // degree > gpu.memory_mib * 1024**2:
        key = "evidence_weights" if degree == 1 else "evidence_weights_tp"
        evidence = message(key, weights=f"{weights.total / GIB:.2f}", **values)
    else:
        need = memory.total_bytes / GIB
        values.pop("scheme"), values.pop("path")
        asked = {"context": memory.load.context_tokens, "streams": memory.load.streams, "speculative": memory.load.speculative}
        evidence = message("evidence_memory", need=f"{need:.1f}", **asked, **values)
    drafter = None
    if memory.load.speculative == "dflash2" and request.checkpoint.model is not None and request.checkpoint.model.drafter:
        drafter = drafters()[request.checkpoint.model.drafter]
    for more in (1, 2, 4, 8):
        if (
            more <= degree
            or tensor_parallel(request, more) != more
            or (engine.tensor_parallel and more not in engine.tensor_parallel)
        ):
            continue
        if _plan(request, engine, gpu, more, memory.load.speculative, memory.load.speculative_tokens, drafter).fits:
            if memory.max_context:
                return Violation(
                    "memory", evidence, message("way_more_cards_or_shorter", count=more, gpu=gpu.name, most=memory.max_context)
                )
            return Violation("memory", evidence, message("way_more_cards", count=more, gpu=gpu.name))
    if memory.max_context:
        return Violation("memory", evidence, message("way_shorter", most=memory.max_context))
    return Violation("memory", evidence, message("way_smaller"))


def _python(engine: Engine, release: OsRelease) -> tuple[str, str]:
    if release.python in engine.python and release.python is not None:
        return release.python, "system"
    preferred = "3.12" if "3.12" in engine.python else engine.python[-1]
    return preferred, "uv"


def _flags(
    engine: Engine, memory: MemoryPlan, degree: int, chosen: Speculative, drafter: Drafter | None, tokens: int, gpu: Gpu | None
) -> dict[str, str]:
    """Flags of `vllm serve`, without their dashes; "true" stands for a flag without a value."""
    load = memory.load
    flags = {"max-model-len": str(load.context_tokens), "max-num-seqs": str(load.streams)}
    if engine.device == "cpu":
        return flags
    flags |= {
        "tensor-parallel-size": str(degree),
        "gpu-memory-utilization": f"{memory.utilization or 0:.2f}",
        "max-num-batched-tokens": str(load.batched_tokens),
        "enable-prefix-caching": "true",
    }
    if engine.dtype or (gpu is not None and gpu.sm < 80):
        flags["dtype"] = engine.dtype or "half"
    if engine.attention_backend:
        flags["attention-backend"] = engine.attention_backend
    if engine.kv_cache_dtype:
        flags["kv-cache-dtype"] = engine.kv_cache_dtype
    if load.language_model_only:
        flags["language-model-only"] = "true"
    if engine.attention_backend:
        flags["mamba-cache-mode"] = "align"
        if chosen == "dflash2" and engine.min_batched_tokens_dflash2 is not None:
            # In align mode the engine stops when a block is larger than the batch (advisory mamba-align-block-size).
            flags["block-size"] = str(min(RELEASE_BLOCK, load.batched_tokens))
            flags["mamba-block-size"] = str(min(RELEASE_MAMBA_BLOCK, load.batched_tokens))
    if chosen == "dflash2" and drafter is not None:
        config: dict[str, object] = {"method": drafter.method, "model": drafter.repo, "num_speculative_tokens": tokens}
        if drafter.revision:
            config["revision"] = drafter.revision
        if engine.attention_backend:
            config |= {"kv_cache_dtype": "auto", "draft_sample_method": "probabilistic"}
        flags["speculative-config"] = json.dumps(config, sort_keys=True)
    elif chosen == "mtp":
        flags["speculative-config"] = json.dumps({"method": "mtp", "num_speculative_tokens": tokens}, sort_keys=True)
    return dict(sorted(flags.items()))


def _env(engine: Engine, memory: MemoryPlan) -> dict[str, str]:
    env = dict(engine.env)
    if memory.score_block_tokens is not None and memory.score_block_tokens != SCORE_BLOCK_TOKENS:
        env["VLLM_FLASH_V100_PREFILL_SCORE_BLOCK_TOKENS"] = str(memory.score_block_tokens)
    return dict(sorted(env.items()))
