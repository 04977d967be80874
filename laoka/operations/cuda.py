"""CUDA toolkits on a host: told and cleared where they are accidents, and the wanted one asked for its release."""

from __future__ import annotations

import shlex
from collections.abc import Generator

from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host, state

from laoka.catalog.messages import Language, text
from laoka.facts.system import InstalledOf
from laoka.operations.apt import apt_get, wait_for_apt
from laoka.operations.refusal import refusal
from laoka.stack.cuda_toolkits import accidents, nvcc_release, pattern_names


class NvccRelease(FactBase[str | None]):
    """The release that an nvcc says; None where there is none, or it says nothing."""

    def command(self, path: str) -> str:
        return f"{shlex.quote(path)} --version 2>/dev/null || true"

    def process(self, output: list[str]) -> str | None:
        return nvcc_release(output)


@operation()
def clear_toolkits(wanted: str | None, remove: bool, lock_wait_s: int, lang: Language) -> Generator[str, None, None]:
    """Tell CUDA packages that are not the wanted toolkit, and remove them when that is asked for.

    + wanted: the toolkit, 12-8; None for none at all
    + remove: remove them
    + lock_wait_s: how long it waits for whoever uses apt
    + lang: language of the message
    """
    installed: dict[str, str] = host.get_fact(InstalledOf, patterns=pattern_names())
    found = accidents(installed, wanted)
    if not found:
        host.noop("no CUDA package beside the wanted toolkit")
        return
    for accident in found:
        why = text(f"driver.cuda_why_{accident.why}", lang)
        names = ", ".join(accident.names)
        host.log_styled(text("driver.cuda_other", lang, wanted=wanted or "-", names=names, why=why), fg="yellow")
    host.log(text("driver.cuda_removes" if remove else "driver.cuda_how", lang))
    if remove:
        names = " ".join(shlex.quote(name) for accident in found for name in accident.names)
        yield from wait_for_apt(lang, lock_wait_s)
        yield apt_get(f"-y --allow-change-held-packages --no-auto-remove purge {names}", lock_wait_s)


@operation()
def nvcc_says(path: str, release: str, lang: Language) -> Generator[str, None, None]:
    """Refuse the host when nvcc is not there or of another release; it reads only, and nothing in a dry run.

    + path: nvcc
    + release: 12.8
    + lang: language of the message
    """
    if not state.is_executing:
        return
    found = host.get_fact(NvccRelease, path=path)
    if found != release:
        yield refusal([text("driver.cuda_nvcc", lang, host=host.name, path=path, found=found or "-", wanted=release)])
    else:
        host.noop(f"nvcc is of CUDA {release}")
