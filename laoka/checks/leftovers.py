"""Leftovers: what earlier attempts left behind that will get in the way."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.facts import bound_in_gib
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, info, ok, unread, warn
from laoka.host.report import HostReport
from laoka.host.unread import Unread

OURS = "/opt/laoka/"
"""Where laoka's own environments are: no leftovers."""


@check("leftovers.engine-processes", source="a killed API server leaves EngineCore and workers behind, which keep their memory")
def engine_processes(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Engine processes without a parent."""
    processes = report.system.processes
    if isinstance(processes, Unread):
        return
    orphans = [p for p in processes if p.name.startswith("VLLM::") and p.parent == 1]
    if orphans:
        yield warn("orphans", *(f"{p.pid} {p.name}: {bound_in_gib(p.resident_bytes)} resident" for p in orphans))
    else:
        yield ok("none")


@check("leftovers.cuda-13", source="CUDA 13.0 removed sm_50 to sm_70 (pytorch issue 157517); nvcc 13.3 starts at sm_75")
def cuda_13(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """No CUDA 13 toolkit: it can't compile for a V100."""
    folders, packages = report.system.cuda_folders, report.packages.installed
    found = [folder for folder in (() if isinstance(folders, Unread) else folders) if "/cuda-13" in folder]
    found += [
        f"{p.name} {p.version}"
        for p in (() if isinstance(packages, Unread) else packages)
        if p.name.startswith(("cuda-toolkit-13", "cuda-nvcc-13", "cuda-compiler-13"))
    ]
    if isinstance(folders, Unread) and isinstance(packages, Unread):
        yield unread(folders)
    elif found:
        yield warn("installed", *found)
    else:
        yield ok("no CUDA 13 toolkit")


@check("leftovers.torch", source="PyTorch 2.8 and later: only cu126 wheels, and 1Cat's cu128 build, keep sm_70")
def torch(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """PyTorch installations that can't use a V100."""
    installs = report.system.installs
    if isinstance(installs, Unread):
        return
    wrong = [i for i in installs if i.name == "torch" and "+cu13" in i.version]
    others = [i for i in installs if i.name == "torch" and i not in wrong and not i.where.startswith(OURS)]
    if wrong:
        yield warn("cuda-13", *(f"{i.where}: torch {i.version}" for i in wrong))
    elif others:
        yield info("there", *(f"{i.where}: torch {i.version}" for i in others))
    else:
        yield ok("no PyTorch beside laoka's engines")


@check("leftovers.engines", source="dist-info folders of the usual places")
def engines(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Other vLLM installations."""
    installs = report.system.installs
    if isinstance(installs, Unread):
        return
    found = [i for i in installs if ("vllm" in i.name or i.name.startswith("revolta")) and not i.where.startswith(OURS)]
    yield info("there", *(f"{i.where}: {i.name} {i.version}" for i in found)) if found else ok("none")


@check("leftovers.card-memory", source="nvidia-smi: memory used")
def card_memory(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Who holds the cards' memory now."""
    listing = report.nvidia.listing
    for gpu in () if isinstance(listing, Unread) else listing.gpus:
        if isinstance(gpu.memory_used_mib, int):
            evidence = f"{gpu.address}: {gpu.memory_used_mib} MiB in use"
            yield info("used", evidence, subject=gpu.address) if gpu.memory_used_mib > 1024 else ok(evidence, subject=gpu.address)
