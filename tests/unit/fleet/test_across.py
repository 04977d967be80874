"""What shows only across hosts: each finding from hosts that are made for it, and none from hosts that are alike."""

from __future__ import annotations

import datetime
from dataclasses import replace

from laoka.checks.finding import Finding
from laoka.fleet.across import Seen, SeenCard, compare, seen_of
from laoka.fleet.expected import Expected, ExpectedCard
from tests.unit.fleet import deployed_host

TODAY = datetime.date(2026, 12, 2)
CARD = SeenCard("0000:03:00.0", "10de:1db6", None, None, "88.00.7E.00.03")
SEEN = Seen(
    simulated=False, os="ubuntu-24.04", kernel="6.8.0-124-generic", driver="580.173.02", board="MACHINIST X99 MD8",
    bios_date="10/12/2024", engine="1cat-vllm==1.5.1", model="a@1", laoka="0.1.0-aa", cards=(CARD,), supplies=(),
)  # fmt: skip


def found(
    seen: dict[str, Seen],
    expected: dict[str, Expected] | None = None,
    findings: dict[str, tuple[Finding, ...]] | None = None,
    today: datetime.date = TODAY,
) -> list[tuple[str, str, str]]:
    told = compare(seen, expected or {}, findings or {}, today)
    return [(finding.id, finding.case, finding.title("en")) for finding in told]


def test_hosts_that_are_alike_say_nothing() -> None:
    assert found({f"h{number}": SEEN for number in range(5)}) == []


def test_the_odd_one_out_of_three_is_named_and_of_two_none_is() -> None:
    odd = replace(SEEN, driver="580.159.03")
    assert found({"a": SEEN, "b": SEEN, "c": odd}) == [
        ("audit.odd-one", "differs", "driver: 580.159.03 on c; 580.173.02 on the other 2")
    ]
    assert found({"a": SEEN, "c": odd}) == []


def test_no_majority_is_no_odd_one() -> None:
    assert found({name: replace(SEEN, kernel=f"6.8.0-{number}") for number, name in enumerate("abcd")}) == []


def test_other_cards_are_not_compared_with_these() -> None:
    t4 = replace(SEEN, driver="570.86.10", cards=(replace(CARD, device_id="10de:1eb8"),))
    assert found({"a": SEEN, "b": SEEN, "c": t4}) == []


def test_a_vbios_that_differs_is_told_with_its_card() -> None:
    old = replace(SEEN, cards=(replace(CARD, vbios="88.00.4F.00.01"),))
    told = found({"a": SEEN, "b": SEEN, "c": old})
    assert [(item[0], "c 0000:03:00.0" in item[2]) for item in told] == [("audit.odd-one", True)]


def test_equal_boards_with_other_bios_dates() -> None:
    told = found(
        {"a": SEEN, "b": replace(SEEN, bios_date="03/01/2016"), "c": replace(SEEN, board="ASUS X99", bios_date="1/1/2020")}
    )
    assert told == [("audit.firmware-dates", "differ", "MACHINIST X99 MD8: BIOS of 03/01/2016, 10/12/2024")]


def test_a_card_that_moved_to_another_host() -> None:
    here = replace(SEEN, cards=(replace(CARD, uuid="GPU-aa"),))
    expected = {"a": Expected("a", cards=(ExpectedCard("0000:03:00.0", "10de:1db6", uuid="GPU-AA", slot="slot 1"),))}
    told = found({"a": SEEN, "b": here}, expected)
    assert told == [("audit.card-elsewhere", "moved", "The card of a (0000:03:00.0 (slot 1)) is in b 0000:03:00.0")]
    assert found({"a": here, "b": SEEN}, expected) == []


def test_two_hosts_that_name_one_card() -> None:
    here = replace(SEEN, cards=(replace(CARD, uuid="GPU-aa"),))
    assert [item[:2] for item in found({"a": here, "b": here})] == [("audit.card-elsewhere", "twice")]


def test_one_model_of_supply_with_trouble_on_two_hosts() -> None:
    weak = replace(SEEN, supplies=("Great Wall 1250W",))
    cut = (Finding("power.last-boot-end", "power", "warn", "cut", ("last line of the previous boot: x",)),)
    told = found({"a": weak, "b": weak, "c": weak}, findings={"a": cut, "c": cut})
    assert told == [("audit.supplies", "suspect", "Great Wall 1250W: 2 of 3 hosts with it lost cards or power")]
    assert found({"a": weak, "b": weak}, findings={"a": cut}) == []


def test_the_end_of_a_branch_is_told_a_year_ahead() -> None:
    assert found({"a": SEEN}, today=datetime.date(2027, 1, 1)) == []
    told = compare({"a": SEEN}, {}, {}, datetime.date(2027, 9, 1))
    assert [(f.id, f.severity, f.title("en")) for f in told] == [
        ("audit.end-of-life", "info", "Branch 580 gets no fixes after 2028-06: 1 hosts")
    ]
    assert [f.severity for f in compare({"a": SEEN}, {}, {}, datetime.date(2028, 3, 1))] == ["warn"]


def test_what_is_kept_of_a_report() -> None:
    seen = seen_of(deployed_host.host(), "Seasonic 1300W")
    assert (seen.os, seen.driver, seen.board) == ("ubuntu-24.04", "580.173.02", "MACHINIST X99 MD8")
    assert (seen.engine, seen.laoka, seen.supplies) == ("1cat-vllm==1.5.1", "0.1.0-aa", ("Seasonic 1300W",))
    assert [card.uuid for card in seen.cards] == ["GPU-00000000-0000-0000-0000-000000000006"] * 2
