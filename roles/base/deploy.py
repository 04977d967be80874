"""What every host has before anything else: apt that waits for its lock, its proxy, and laoka's extra package sources."""

from __future__ import annotations

from io import StringIO

from pydantic import Field
from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import apt_update_when_stale
from roles.settings import RoleSettings


class ExpectedGpu(RoleSettings):
    """A card that has to be there."""

    bdf: str = Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
    """PCI address, as in `lspci -D`."""
    device_id: str = Field(pattern=r"^10de:[0-9a-f]{4}$")
    """PCI id, as in `lspci -nn`."""
    uuid: str = ""
    serial: str = ""
    slot: str = ""
    """Where a person finds it."""


class BaseSettings(RoleSettings):
    """Settings that several roles share."""

    expected_gpus: tuple[ExpectedGpu, ...] = ()
    """The cards of this host: {"bdf": "0000:03:00.0", "device_id": "10de:1db6"}, and if you like "slot", "serial", "uuid"."""
    simulated: bool = False
    """True where the card is laoka's simulation; messages then say so."""
    lang: str = "en"
    """Language of what the host tells people: en or zh."""
    http_proxy: str | None = None
    """Proxy for apt and pip on the host, such as http://10.0.0.2:3128."""
    no_proxy: str = "127.0.0.1,localhost"
    """Hosts that are reached without the proxy."""
    pip_index_url: str | None = None
    """Mirror of the Python package index; None keeps pip's own settings."""
    pip_cache_dir: str | None = None
    """Where pip keeps downloads on the host; None keeps pip's own place."""
    apt_lock_wait_s: int = 300
    """How long apt may be busy on the host before a run gives up, in seconds."""
    apt_sources: dict[str, str] = {}
    """Extra one-line apt sources by file name, such as {"local": "deb [trusted=yes] file:///srv/debs ./"}."""

    def proxy_env(self) -> dict[str, str]:
        """Environment for what downloads on the host: the proxy, and what is reached without it; empty without a proxy."""
        if not self.http_proxy:
            return {}
        return {"https_proxy": self.http_proxy, "http_proxy": self.http_proxy, "no_proxy": self.no_proxy}

    def pip_env(self) -> dict[str, str]:
        """Environment for pip on the host: mirror, cache and proxy."""
        pairs = {"PIP_INDEX_URL": self.pip_index_url, "PIP_CACHE_DIR": self.pip_cache_dir, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return {**{name: value for name, value in pairs.items() if value}, **self.proxy_env()}


@deploy("Base")
def base() -> None:
    """Settle apt: wait for the lock, the proxy, extra sources; refresh its lists when they are stale."""
    settings = BaseSettings.of(host)
    proxy = f'Acquire::http::Proxy "{settings.http_proxy}";\nAcquire::https::Proxy "{settings.http_proxy}";\n'
    files.put(
        name="apt waits for its lock and knows the proxy",
        src=StringIO('DPkg::Lock::Timeout "300";\nAcquire::Retries "3";\n' + (proxy if settings.http_proxy else "")),
        dest="/etc/apt/apt.conf.d/50laoka",
    )
    for file_name, line in sorted(settings.apt_sources.items()):
        files.put(
            name=f"apt source {file_name}",
            src=StringIO(f"{line}\n"),
            dest=f"/etc/apt/sources.list.d/laoka-{file_name}.list",
        )
    apt_update_when_stale(name="apt lists are fresh")
