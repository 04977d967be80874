"""What laoka has put on a host: engine, model, flags, what units were started with, the watchdog's state, the deploys."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from laoka.host.deploy_lock import Owner, read_lock, read_owner, stale
from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread

STAMPS = "/var/lib/laoka/stamps/"
ENGINE = "/opt/laoka/engines/current"
AGENT = "/opt/laoka/agent/current"
MODEL, DRAFTER = "/srv/laoka/models/current", "/srv/laoka/models/drafter"
SERVE = "/etc/qwen-serve/"
WATCHDOG_STATE = "/run/laoka/watchdog.json"
ALERT_TEST = "/var/lib/laoka/watchdog/alert-test.json"
DECISIONS = ("/var/lib/laoka/speculative.json", "/etc/laoka/speculative.json")
"""Where the decision on speculative decoding lies; the first one that is there counts."""
DEPLOYS = "/var/lib/laoka/deploys"

# What took the place of a value in a capture (laoka.host.redact).
_PSEUDONYM = re.compile(r"(secret-\d+|SERIAL\d{6}|GPU-00000000-0000-4000-8000-[0-9a-f]{12})$")


def is_pseudonym(value: object) -> bool:
    """Whether a value is what a capture shows in its place: it can't be compared with anything."""
    return isinstance(value, str) and _PSEUDONYM.match(value) is not None


@dataclass(frozen=True)
class InstalledEngine:
    """The engine that `current` leads to, by the stamp of its finished environment.

    `kernels` is what was proven of its kernels when it was installed: laoka.serving.kernels.Proof as a table; None: no record.
    """

    folder: str
    name: str
    version: str
    wheel_sha256: str
    kernels: Mapping[str, Any] | None


@dataclass(frozen=True)
class PlacedModel:
    """A link of the model store: the repository with `--` for `/`, and the revision, by the names of its folders."""

    repo: str
    revision: str


@dataclass(frozen=True)
class UnitConfig:
    """Whether the files that a unit is made of are still those that it last started well with; `unlike` when they are not."""

    unit: str
    paths: tuple[str, ...]
    as_started: bool


@dataclass(frozen=True)
class Incident:
    """An incident of the watchdog, as its state file tells it. Times are Unix seconds."""

    id: str
    kind: str
    severity: str
    card: str
    opened_unix_s: float
    closed_unix_s: float | None
    drill: bool
    next: str


@dataclass(frozen=True)
class WatchdogState:
    """The watchdog's state file. `written_unix_s` is when; `sensors` (name, verdict)."""

    written_unix_s: float
    sensors: tuple[tuple[str, str], ...]
    open: tuple[Incident, ...]
    recent: tuple[Incident, ...]
    channels: int
    failing: tuple[str, ...]


@dataclass(frozen=True)
class AlertTest:
    """The last `laoka watchdog test-alert`: when, how many channels took it, how many did not."""

    unix_s: float
    delivered: int
    failed: int


@dataclass(frozen=True)
class DeployLine:
    """One deploy as the host's ledger has it.

    `outcome` "done"; "interrupted": its connection ended before it gave the lock back; "running": it holds the lock.
    """

    run: str
    who: str
    what: str
    inventory: str
    lock: str
    laoka: str
    began_unix_s: float
    ended_unix_s: float | None
    outcome: str
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Deployed:
    """All of it. None: it is not there, which was read; Unread: what is there can't be read."""

    agent: str | None
    engine: Maybe[InstalledEngine | None]
    model: PlacedModel | None
    drafter: PlacedModel | None
    speculative: Maybe[Mapping[str, Any] | None]
    flags: tuple[tuple[str, Mapping[str, Any]], ...]
    """(unit, flags of its engine) of each server."""
    units: tuple[UnitConfig, ...]
    serving: Maybe[Mapping[str, Any] | None]
    watchdog: Maybe[WatchdogState | None]
    alert_test: Maybe[AlertTest | None]
    deploys: tuple[DeployLine, ...]
    """Oldest first; the one that holds the lock is the last."""

    def unit(self, name: str) -> UnitConfig | None:
        """What a unit is made of, None when laoka never started it well here."""
        return next((item for item in self.units if item.unit == name), None)


def read_deployed(sections: Sections) -> Maybe[Deployed]:
    """From the section laoka. A host without it has nothing of laoka's, and the probe says so."""
    output = sections.output("laoka")
    if isinstance(output, Unread):
        return output
    files: dict[str, list[str]] = {}
    links: dict[str, str] = {}
    hashes: dict[str, str] = {}
    owner = None
    for line in output.splitlines():
        if line.startswith("@link "):
            name, _, target = line.removeprefix("@link ").partition(" ")
            links[name] = target
        elif line.startswith("@owner "):
            owner = read_owner(line.removeprefix("@owner "))
        elif line.startswith("@hash "):
            digest, _, name = line.removeprefix("@hash ").partition("  ")
            hashes[name] = digest
        else:
            path, _, content = line.partition(":")
            files.setdefault(path, []).append(content)
    decision = next((_json(files, path) for path in DECISIONS if path in files), None)
    return Deployed(
        agent=links[AGENT].rsplit("/", 1)[-1] if AGENT in links else None,
        engine=_engine(files, links),
        model=_placed(links.get(MODEL)),
        drafter=_placed(links.get(DRAFTER)),
        speculative=decision,
        flags=tuple(_flags(files)),
        units=tuple(_units(files, links, hashes)),
        serving=_json(files, "/run/qwen-serve/state.json"),
        watchdog=_watchdog(_json(files, WATCHDOG_STATE)),
        alert_test=_alert_test(_json(files, ALERT_TEST)),
        deploys=tuple(_deploys(files, owner)),
    )


def _json(files: Mapping[str, list[str]], path: str) -> Maybe[Mapping[str, Any] | None]:
    if path not in files:
        return None
    return _table("\n".join(files[path]), path)


def _table(text: str, path: str) -> Maybe[Mapping[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Unread(f"{path} is not JSON")
    return found if isinstance(found, dict) else Unread(f"{path} is not a JSON object")


def _engine(files: Mapping[str, list[str]], links: Mapping[str, str]) -> Maybe[InstalledEngine | None]:
    if ENGINE not in links:
        return None
    words = files.get(f"{ENGINE}/laoka-complete", [""])[0].split()
    if len(words) != 3:
        return Unread(f"{links[ENGINE]} has no stamp: its installation did not end")
    record = _json(files, f"{ENGINE}/laoka-engine.json")
    kernels = record.get("kernels") if isinstance(record, Mapping) else None
    return InstalledEngine(links[ENGINE], words[0], words[1], words[2], kernels if isinstance(kernels, Mapping) else None)


def _placed(target: str | None) -> PlacedModel | None:
    parts = (target or "").rstrip("/").split("/")
    return PlacedModel(parts[-2].replace("--", "/", 1), parts[-1]) if len(parts) > 2 else None


def _flags(files: Mapping[str, list[str]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for path, lines in sorted(files.items()):
        if not path.startswith(SERVE) or not path.endswith("/vllm.yaml"):
            continue
        instance = path.removeprefix(SERVE).removesuffix("vllm.yaml").strip("/")
        yield (f"qwen-serve@{instance}.service" if instance else "qwen-serve.service"), read_flags(lines)


def read_flags(lines: Iterable[str]) -> dict[str, Any]:
    """The flags of a vllm.yaml as laoka renders it: a key and a JSON value a line; other values stay text."""
    found: dict[str, Any] = {}
    for line in lines:
        key, colon, value = line.partition(": ")
        if not colon or line.startswith("#"):
            continue
        try:
            found[key.strip()] = json.loads(value)
        except (ValueError, RecursionError):
            found[key.strip()] = value.strip()
    return found


def _units(files: Mapping[str, list[str]], links: Mapping[str, str], hashes: Mapping[str, str]) -> Iterable[UnitConfig]:
    for path, lines in sorted(files.items()):
        if not path.startswith(STAMPS) or not path.endswith(".config"):
            continue
        paths = tuple(line for line in lines[1:] if line)
        yield UnitConfig(path.removeprefix(STAMPS).removesuffix(".config"), paths, config_hash(paths, links, hashes) == lines[0])


def config_hash(paths: Iterable[str], links: Mapping[str, str], hashes: Mapping[str, str]) -> str:
    """What laoka.serving.unit_config.config_hash_command prints for these paths, out of what the probe read of each."""
    text = ""
    for path in paths:
        if path in links:
            text += f"{path} {links[path]}\n"
        else:
            text += f"{path} {hashes[path]}  -\n" if path in hashes else f"{path} none\n"
    return hashlib.sha256(text.encode()).hexdigest()


def _watchdog(raw: Maybe[Mapping[str, Any] | None]) -> Maybe[WatchdogState | None]:
    if raw is None or isinstance(raw, Unread):
        return raw
    try:
        incidents, alerts = raw["incidents"], raw["alerts"]
        return WatchdogState(
            float(raw["written_unix_s"]),
            tuple((str(item["name"]), str(item["verdict"])) for item in raw["sensors"]),
            tuple(_incident(item) for item in incidents["open"]),
            tuple(_incident(item) for item in incidents["recent"]),
            int(alerts["channels"]),
            tuple(str(name) for name in alerts["failing"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        return Unread(f"{WATCHDOG_STATE} is of another form ({type(error).__name__} {error})")


def _incident(raw: Mapping[str, Any]) -> Incident:
    closed = raw.get("closed_unix_s")
    return Incident(
        str(raw["id"]), str(raw["class"]), str(raw["severity"]), str(raw["card"]), float(raw["opened_unix_s"]),
        None if closed is None else float(closed), bool(raw["drill"]), str(raw["next"]),
    )  # fmt: skip


def _alert_test(raw: Maybe[Mapping[str, Any] | None]) -> Maybe[AlertTest | None]:
    if raw is None or isinstance(raw, Unread):
        return raw
    try:
        return AlertTest(float(raw["unix_s"]), int(raw["delivered"]), int(raw["failed"]))
    except (KeyError, TypeError, ValueError) as error:
        return Unread(f"{ALERT_TEST} is of another form ({type(error).__name__})")


def _deploys(files: Mapping[str, list[str]], owner: Owner | None) -> Iterable[DeployLine]:
    for line in files.get(f"{DEPLOYS}/ledger", []):
        found = read_deploy(line)
        if found is not None:
            yield found
    lines = files.get(f"{DEPLOYS}/lock", [""])
    held = read_deploy(lines[0])
    if held is not None:
        lock = read_lock(lines)
        lives = lock is not None and owner is not None and stale(lock, owner) is None
        yield dataclasses.replace(held, outcome="running" if lives else "interrupted")


def read_deploy(line: str) -> DeployLine | None:
    """One line of the ledger, or the first one of the lock; None for what is none."""
    raw = _table(line, DEPLOYS)
    if isinstance(raw, Unread):
        return None
    try:
        ended = raw.get("ended_unix_s")
        return DeployLine(
            str(raw["run"]), str(raw["who"]), str(raw["what"]), str(raw["inventory"]), str(raw["lock"]), str(raw["laoka"]),
            float(raw["began_unix_s"]), None if ended is None else float(ended), str(raw.get("outcome", "running")),
            tuple(str(name) for name in raw.get("changed", ())),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
