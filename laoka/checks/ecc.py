"""Memory errors: ECC counts and retired pages by the rules of cards before Ampere, row remapping of those after."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.facts import listed_cards, name_of
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.nvidia_smi import SmiGpu
from laoka.host.report import HostReport
from laoka.host.unread import Unread

# At most 64 pages can be retired before Ampere; Azure's V100 check fails at 62 with one pending.
PAGE_LIMIT, PAGES_FULL = 64, 62


def _shown(report: HostReport) -> tuple[SmiGpu, ...]:
    listed = listed_cards(report)
    return () if isinstance(listed, Unread) else listed


@check("ecc.on", source="nvidia-smi; ECC is on by default on a V100")
def on(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """ECC is on: without it a failing memory gives wrong answers instead of errors."""
    listed = listed_cards(report)
    if isinstance(listed, Unread):
        yield unread(listed)
        return
    for gpu in listed:
        if isinstance(gpu.ecc_enabled, Unread):
            yield info("none", f"{name_of(gpu)}: {gpu.ecc_enabled.reason}", subject=name_of(gpu))
        elif gpu.ecc_enabled:
            yield ok(f"{name_of(gpu)}: ECC on", subject=name_of(gpu))
        else:
            yield warn("off", f"{name_of(gpu)}: ECC off", subject=name_of(gpu))


@check("ecc.mode-change", source="nvidia-smi: Current and Pending of the ECC mode")
def mode_change(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A change of the ECC mode that waits for a reboot."""
    for gpu in _shown(report):
        now, later = gpu.ecc_enabled, gpu.ecc_enabled_next
        if isinstance(now, bool) and isinstance(later, bool) and now != later:
            yield info("waits", f"{name_of(gpu)}: now {now}, after a reboot {later}", subject=name_of(gpu))


@check("ecc.uncorrected", source="nvidia-smi: double-bit (DRAM uncorrectable) errors")
def uncorrected(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Uncorrected errors: since the driver was loaded they are news, over the card's life they are its history."""
    for gpu in _shown(report):
        now, ever = gpu.ecc.volatile_uncorrected, gpu.ecc.aggregate_uncorrected
        if isinstance(now, Unread):
            if gpu.ecc_enabled is True:
                yield unread(now, subject=name_of(gpu))
            continue
        evidence = f"{name_of(gpu)}: {now} since the driver was loaded, {ever} in all"
        if now:
            yield fail("now", evidence, subject=name_of(gpu))
        elif isinstance(ever, int) and ever:
            yield warn("past", evidence, subject=name_of(gpu))
        else:
            yield ok(evidence, subject=name_of(gpu))


@check("ecc.corrected", source="nvidia-smi: single-bit errors; a V100 with 236,795 of them also fell off the bus six times")
def corrected(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Corrected errors: harmless one by one, a trend to watch."""
    for gpu in _shown(report):
        now, ever = gpu.ecc.volatile_corrected, gpu.ecc.aggregate_corrected
        if isinstance(now, Unread) or isinstance(ever, Unread):
            continue
        evidence = f"{name_of(gpu)}: {now} since the driver was loaded, {ever} in all"
        yield info("some", evidence, subject=name_of(gpu)) if now or ever else ok(evidence, subject=name_of(gpu))


@check("ecc.retired-pages", source="64 pages at most before Ampere; Azure NHC fails a V100 at 62 with one pending")
def retired(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """How many of the 64 places for retired pages are used."""
    for gpu in _shown(report):
        single, double = gpu.retired_pages_single_bit, gpu.retired_pages_double_bit
        if isinstance(single, Unread) or isinstance(double, Unread):
            continue  # cards from Ampere on remap rows instead: ecc.remapping
        total = single + double
        evidence = f"{name_of(gpu)}: {single} for single-bit, {double} for double-bit errors"
        if total >= PAGES_FULL:
            yield fail("full", evidence, subject=name_of(gpu), total=total, limit=PAGE_LIMIT)
        elif total:
            yield info("some", evidence, subject=name_of(gpu), total=total, limit=PAGE_LIMIT)
        else:
            yield ok(evidence, subject=name_of(gpu))


@check("ecc.pending", source="Volta: a page is retired only when the driver is loaded again or the card reset")
def pending(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A page that waits to be retired is still in use."""
    for gpu in _shown(report):
        if isinstance(gpu.retired_pages_pending, Unread):
            continue
        evidence = f"{name_of(gpu)}: pending {'yes' if gpu.retired_pages_pending else 'no'}"
        yield warn("waits", evidence, subject=name_of(gpu)) if gpu.retired_pages_pending else ok(evidence, subject=name_of(gpu))


@check("ecc.remapping", source="nvidia-smi: Remapped Rows (Ampere and later)")
def remapping(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Row remapping: pending, or failed for good."""
    for gpu in _shown(report):
        if gpu.remapping_failed is True:
            yield fail("failed", f"{name_of(gpu)}: a row could not be remapped", subject=name_of(gpu))
        elif gpu.remapping_pending is True:
            yield warn("waits", f"{name_of(gpu)}: a row waits to be remapped", subject=name_of(gpu))
        elif gpu.remapping_failed is False:
            yield ok(f"{name_of(gpu)}: nothing pending, nothing failed", subject=name_of(gpu))
