"""Operations on versions that lie side by side: have a folder; point a link at it, and back if the unit does not answer."""

from __future__ import annotations

import shlex

from pyinfra.api.operation import operation
from pyinfra.context import host, state
from pyinfra.facts.files import Directory, Link

from laoka.facts.system import StampText
from laoka.operations.steps import Commands, locked

TOLD = "/run/laoka/switch"
"""What the last switch said at its end."""


@operation()
def have_folder(path: str, commands: list[str]) -> Commands:
    """Run commands that make a folder, unless it is there.

    + path: the folder; it has to appear only when it is whole
    + commands: shell commands, safe to repeat
    """
    if host.get_fact(Directory, path=path):
        host.noop(f"{path} is there")
        return
    for command in commands:
        yield locked(command)


@operation()
def switch_served(link: str, target: str, python: str, unit: str, previous: str = "") -> Commands:
    """Point a link at `target` in one step. A unit that runs is restarted, has to answer, and gets the old target back if not.

    + link: the symbolic link that the unit works with
    + target: as written into the link
    + python: Python of the host's own laoka
    + unit: unit that is restarted when it runs; one that does not run is left alone
    + previous: a link that gets the old target, for the way back
    """
    found = host.get_fact(Link, path=link)
    if found and found["link_target"] == target:
        host.noop(f"{link} points to {target}")
        return
    words = [python, "-m", "laoka.serving.switch", "--link", link, "--target", target, "--unit", unit, "--told", TOLD]
    yield locked(" ".join(shlex.quote(word) for word in [*words, *(["--previous", previous] if previous else [])]))
    # For how long nobody got an answer: pyinfra shows nothing of what a command says that succeeds.
    told = host.get_fact(StampText, path=TOLD) if state.is_executing else ""
    if told:
        host.log(told)
