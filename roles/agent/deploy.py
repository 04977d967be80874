"""laoka's own tools on the host: the watchdog, the readiness gate, the model store, in a versioned environment of their own."""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.catalog.messages import language
from laoka.operations import wheel
from laoka.operations.steps import apt_install, switch_link, until_stamped
from roles.base.deploy import BaseSettings
from roles.engine.commands import with_env

HOME = "/opt/laoka/agent"
PYTHON = f"{HOME}/current/bin/python"


@deploy("Agent")
def agent() -> None:
    """Install this very laoka on the host, beside the version that runs, and switch."""
    settings = BaseSettings.of(host)
    built = wheel.build()
    version = f"{built.name.split('-')[1]}-{wheel.source_hash()}"
    folder = f"{HOME}/{version}"
    apt_install(
        name="Python's venv",
        packages=["python3-venv"],
        lock_wait_s=settings.apt_lock_wait_s,
        lang=language(settings.lang),
    )
    files.put(name=f"laoka {version}", src=str(built), dest=f"{HOME}/wheels/{version}/{built.name}", mode="644")
    until_stamped(
        name=f"laoka {version} in its environment (about 12 MB of downloads)",
        stamp=f"{folder}/laoka-complete",
        text=version,
        commands=[
            f"rm -rf {folder}",
            f"python3 -m venv {folder}",
            with_env(settings.pip_env(), f"{folder}/bin/pip install -q {HOME}/wheels/{version}/{built.name}"),
        ],
        _timeout=900,
    )
    switch_link(name="Switch to it", path=f"{HOME}/current", target=version)
    files.link(name="laoka is on the PATH", path="/usr/local/bin/laoka", target=f"{HOME}/current/bin/laoka")
