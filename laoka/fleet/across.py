"""What only shows when hosts stand side by side: the odd one out, moved cards, equal boards and supplies, ends ahead. Pure."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from laoka.catalog.drivers import branches
from laoka.checks.driver import branch_of, version_in_use
from laoka.checks.facts import listed_cards
from laoka.checks.finding import Finding, Outcome
from laoka.checks.registry import info, warn
from laoka.fleet.expected import Expected
from laoka.host.deployed import InstalledEngine, is_pseudonym
from laoka.host.report import HostReport
from laoka.host.unread import Unread

AREA = "fleet"
IDS = ("audit.odd-one", "audit.firmware-dates", "audit.card-elsewhere", "audit.supplies", "audit.end-of-life")
LIKE_LEAST = 3
"""With two hosts neither is the odd one."""
AHEAD_DAYS, SOON_DAYS = 365, 180
# Findings that a weak or failing power supply can be behind.
SUPPLY_TROUBLE = (
    ("power.last-boot-end", "cut"), ("xid.fell-off", "fell-off"), ("cards.present", "gone"), ("cards.present", "missing"),
    ("cards.present", "none"), ("cards.answer", "dead"), ("audit.cards", "missing"),
)  # fmt: skip


@dataclass(frozen=True)
class SeenCard:
    """A card as its host shows it; None: not read, or hidden in a capture."""

    bdf: str
    device_id: str
    uuid: str | None
    serial: str | None
    vbios: str | None


@dataclass(frozen=True)
class Seen:
    """The little of a host's report that is compared with others and shown in the table; None: not read, or not there."""

    simulated: bool
    os: str | None
    kernel: str | None
    driver: str | None
    board: str | None
    bios_date: str | None
    engine: str | None
    model: str | None
    laoka: str | None
    cards: tuple[SeenCard, ...]
    supplies: tuple[str, ...]


def seen_of(report: HostReport, supply: str | None = None) -> Seen:
    """What an audit keeps of a report.

    Arguments: `supply` is the model of the host's power supply by its inventory; ordinary boards do not tell it.
    """
    system, firmware, deployed = report.system.os, report.firmware, report.deployed
    version, shown = version_in_use(report), listed_cards(report)
    smi = {} if isinstance(shown, Unread) else {gpu.address: gpu for gpu in shown if gpu.address}
    found = []
    for gpu in () if isinstance(report.gpus, Unread) else report.gpus:
        other = smi.get(gpu.address)
        found.append(
            SeenCard(gpu.address, gpu.id_text, None, None, None)
            if other is None
            else SeenCard(gpu.address, gpu.id_text, _plain(other.uuid), _plain(other.serial), _plain(other.vbios_version))
        )
    own = None if isinstance(deployed, Unread) else deployed
    engine = own.engine if own else None
    told = () if isinstance(firmware.power_supplies, Unread) else firmware.power_supplies
    board = " ".join(part for part in (_plain(firmware.board_vendor), _plain(firmware.board_name)) if part)
    return Seen(
        simulated=report.probe.simulated,
        os=None if isinstance(system, Unread) else f"{system.id}-{system.version_id}",
        kernel=_plain(report.kernel.release),
        driver=_plain(version),
        board=board or None,
        bios_date=_plain(firmware.bios_date),
        engine=f"{engine.name}=={engine.version}" if isinstance(engine, InstalledEngine) else None,
        model=f"{own.model.repo}@{own.model.revision[:12]}" if own and own.model else None,
        laoka=own.agent if own else None,
        cards=tuple(found),
        supplies=(supply,) if supply else tuple(item.name for item in told if item.name and item.max_power_w),
    )


def _plain(value: object) -> str | None:
    return value if isinstance(value, str) and value and not is_pseudonym(value) else None


def compare(
    seen: Mapping[str, Seen],
    expected: Mapping[str, Expected],
    findings: Mapping[str, Sequence[Finding]],
    today: datetime.date,
) -> tuple[Finding, ...]:
    """Findings across hosts. Arguments: what each host that could be read is, should be, and what was found on it."""
    found: list[Finding] = []
    for check_id, outcomes in (
        ("audit.card-elsewhere", _cards_elsewhere(seen, expected)),
        ("audit.odd-one", _odd_ones(seen)),
        ("audit.firmware-dates", _firmware_dates(seen)),
        ("audit.supplies", _supplies(seen, findings)),
        ("audit.end-of-life", _ends(seen, today)),
    ):
        found += [Finding(check_id, AREA, o.severity, o.case, o.evidence, o.subject, o.values) for o in outcomes]
    return tuple(found)


def _odd_ones(seen: Mapping[str, Seen]) -> Iterator[Outcome]:
    like: dict[tuple[str, ...], list[str]] = {}
    for host, one in seen.items():
        like.setdefault(tuple(sorted({card.device_id for card in one.cards})), []).append(host)
    for hosts in like.values():
        for what in ("driver", "kernel", "os", "engine", "model", "laoka"):
            yield from _odd(what, {host: getattr(seen[host], what) for host in hosts})
        kinds: dict[str, dict[str, str | None]] = {}
        for host in hosts:
            for card in seen[host].cards:
                kinds.setdefault(card.device_id, {})[f"{host} {card.bdf}"] = card.vbios
        for kind, versions in kinds.items():
            yield from _odd(f"VBIOS {kind}", versions)


def _odd(what: str, values: Mapping[str, str | None]) -> Iterator[Outcome]:
    known = {host: value for host, value in values.items() if value is not None}
    if len(known) < LIKE_LEAST:
        return
    usual, count = Counter(known.values()).most_common(1)[0]
    if count * 3 < len(known) * 2 or count == len(known):
        return
    others: dict[str, list[str]] = {}
    for host, value in known.items():
        if value != usual:
            others.setdefault(value, []).append(host)
    for value, hosts in others.items():
        evidence = f"{what}: {value}: {_listed(hosts)}; {usual}: {count} others"
        yield warn(
            "differs", evidence, subject=f"{what} {value}", what=what, odd=value, hosts=_listed(hosts), usual=usual, count=count
        )


def _listed(hosts: Iterable[str]) -> str:
    names = sorted(hosts)
    return ", ".join(names[:6]) + (f" (+{len(names) - 6})" if len(names) > 6 else "")


def _firmware_dates(seen: Mapping[str, Seen]) -> Iterator[Outcome]:
    boards: dict[str, dict[str, list[str]]] = {}
    for host, one in seen.items():
        if one.board and one.bios_date:
            boards.setdefault(one.board, {}).setdefault(one.bios_date, []).append(host)
    for board, dates in boards.items():
        if len(dates) > 1:
            evidence = tuple(f"{date}: {_listed(hosts)}" for date, hosts in sorted(dates.items(), key=lambda item: _day(item[0])))
            ordered = ", ".join(sorted(dates, key=_day))
            yield warn("differ", *evidence, subject=board, board=board, dates=ordered)


def _day(date: str) -> tuple[str, ...]:
    """DMI writes 07/21/2023; sorted by year first."""
    parts = date.split("/")
    return (parts[-1], *parts[:-1])


def _cards_elsewhere(seen: Mapping[str, Seen], expected: Mapping[str, Expected]) -> Iterator[Outcome]:
    where: dict[str, list[str]] = {}
    for host, one in seen.items():
        for card in one.cards:
            for mark in {card.uuid, card.serial} - {None}:
                where.setdefault(str(mark).lower(), []).append(f"{host} {card.bdf}")
    for uuid, places in where.items():
        hosts = {place.split(" ")[0] for place in places}
        if len(hosts) > 1 and uuid.startswith("gpu-"):
            yield warn("twice", *places, subject=uuid, uuid=uuid, hosts=_listed(hosts))
    for home, wanted in expected.items():
        for place in wanted.cards or ():
            for mark in (place.uuid, place.serial):
                found = where.get(mark.lower(), []) if mark else []
                others = [one for one in found if one.split(" ")[0] != home]
                if others and len(others) == len(found):
                    evidence = f"{mark}: inventory {home} {place.bdf}, seen at {others[0]}"
                    yield warn("moved", evidence, subject=f"{home} {place.bdf}", home=home, place=place.name, seen=others[0])
                    break


def _supplies(seen: Mapping[str, Seen], findings: Mapping[str, Sequence[Finding]]) -> Iterator[Outcome]:
    models: dict[str, list[str]] = {}
    for host, one in seen.items():
        for model in dict.fromkeys(one.supplies):
            models.setdefault(model, []).append(host)
    for model, hosts in models.items():
        ill = {
            host: next((f.evidence[0] for f in findings.get(host, ()) if (f.id, f.case) in SUPPLY_TROUBLE and f.evidence), None)
            for host in hosts
        }
        troubled = {host: words for host, words in ill.items() if words}
        if len(troubled) > 1:
            evidence = tuple(f"{host}: {words}" for host, words in sorted(troubled.items()))
            yield warn("suspect", *evidence, subject=model, model=model, count=len(troubled), all=len(hosts))


def _ends(seen: Mapping[str, Seen], today: datetime.date) -> Iterator[Outcome]:
    rows = {row.number: row for row in branches()}
    hosts: dict[int, list[str]] = {}
    for host, one in seen.items():
        if one.driver and one.driver[:3].isdecimal():
            hosts.setdefault(branch_of(one.driver), []).append(host)
    for number, names in sorted(hosts.items()):
        row = rows.get(number)
        if row is None or row.ended or row.eol is None:
            continue  # driver.end-of-life says on each host that a branch has ended
        year, month = (int(part) for part in row.eol.split("-"))
        left = (datetime.date(year, month, 1) - today).days
        evidence = f"branch {row.id} until {row.eol}: {_listed(names)}"
        values = {"branch": row.id, "month": row.eol, "count": len(names)}
        if left < 0:
            yield warn("passed", evidence, subject=row.id, branch=row.id, count=len(names))
        elif left <= AHEAD_DAYS:
            yield (warn if left <= SOON_DAYS else info)("ahead", evidence, subject=row.id, **values)
