"""What every host has before anything else: apt that waits for its lock, its proxy, and laoka's extra package sources."""

from __future__ import annotations

import hashlib
import sys
from io import StringIO
from pathlib import Path

from pydantic import Field
from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka import __version__
from laoka.catalog.messages import language
from laoka.operations import wheel
from laoka.operations.deploy_lock import give_back_deploy_lock, take_deploy_lock
from laoka.operations.steps import apt_update_when_stale, index_debs, keep_only
from roles.plan import lock_path
from roles.settings import InventoryError, RoleSettings


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
    apt_lock_wait_s: int = Field(300, ge=0)
    """How long apt may be busy on the host before a run gives up, in seconds."""
    apt_sources: dict[str, str] = {}
    """Extra one-line apt sources by file name, such as {"local": "deb [trusted=yes] file:///srv/debs ./"}."""
    apt_keyrings: dict[str, str] = {}
    """Keyrings on your machine for signed-by: {"x.gpg": "keys/x.gpg"} is /usr/share/keyrings/laoka-x.gpg on the host."""
    deb_folders: tuple[str, ...] = ()
    """Folders on the host with .debs (a USB disk, a share); laoka makes the index that apt needs, beside them."""
    deploy_wait_s: int = 0
    """How long a deploy waits for another one that is under way on the same host, in seconds; 0: the host is refused at once."""
    deploy_take_over: bool = False
    """True takes a host whoever is deploying there: for a run whose machine is gone while the host still keeps its connection."""
    apt_sources_only: bool = False
    """True: apt on the host asks apt_sources and deb_folders and nothing else: a site without internet, or with a full mirror."""

    def proxy_env(self) -> dict[str, str]:
        """Environment for what downloads on the host: the proxy, and what is reached without it; empty without a proxy."""
        if not self.http_proxy:
            return {}
        return {"https_proxy": self.http_proxy, "http_proxy": self.http_proxy, "no_proxy": self.no_proxy}

    def pip_env(self) -> dict[str, str]:
        """Environment for pip on the host: mirror, cache and proxy."""
        pairs = {"PIP_INDEX_URL": self.pip_index_url, "PIP_CACHE_DIR": self.pip_cache_dir, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return {**{name: value for name, value in pairs.items() if value}, **self.proxy_env()}


OWN_SOURCES = "/etc/apt/laoka.sources.d"


def apt_settings(settings: BaseSettings) -> str:
    """apt's settings on a host: it waits for its lock and tries again, by the proxy, from the sources that count."""
    # Somebody else's apt waits by it too; ours is told for itself, as long as apt_lock_wait_s says.
    lines = ['DPkg::Lock::Timeout "300";', 'Acquire::Retries "3";']
    if settings.http_proxy:
        lines += [f'Acquire::{scheme}::Proxy "{settings.http_proxy}";' for scheme in ("http", "https")]
        # apt has no list of exceptions, but takes each for itself.
        lines += [
            f'Acquire::http::Proxy::{name.strip()} "DIRECT";' for name in settings.no_proxy.split(",") if name.strip()[:1].isalnum()
        ]
    if settings.apt_sources_only:
        lines += ['Dir::Etc::SourceList "/dev/null";', f'Dir::Etc::SourceParts "{OWN_SOURCES}";']
    return "\n".join(lines) + "\n"


def _this_deploy() -> dict[str, str]:
    """What the lock and the ledger say of this run on this host."""
    words = [word for word in sys.argv[1:] if word.endswith(".py")]
    path = lock_path(host)
    return {
        "what": " ".join(words[1:]) or "?",
        "inventory": words[0] if words else "?",
        "lock": f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" if path else "none",
        "laoka": f"{__version__}-{wheel.source_hash()}",
    }


@deploy("Deploy lock")
def lock_host() -> None:
    """Have the host to this run alone; at the head of every deploy, after the gates and before the first change."""
    settings = BaseSettings.of(host)
    take_deploy_lock(
        name="No other deploy is under way here", what=_this_deploy(), wait_s=settings.deploy_wait_s,
        take_over=settings.deploy_take_over, lang=language(settings.lang),
    )  # fmt: skip


@deploy("Deploy lock")
def unlock_host() -> None:
    """Give the host back and write down what this run changed; the last line of every deploy."""
    give_back_deploy_lock(name="The deploy is over", what=_this_deploy(), lang=language(BaseSettings.of(host).lang))


@deploy("Base")
def base() -> None:
    """Take the deploy's lock; settle apt: its lock, the proxy, sources and keyrings; refresh its lists when they are stale."""
    lock_host()
    settings = BaseSettings.of(host)
    lang = language(settings.lang)
    files.put(
        name="apt waits for its lock, knows the proxy and where packages come from",
        src=StringIO(apt_settings(settings)),
        dest="/etc/apt/apt.conf.d/50laoka",
    )
    kept = []
    for file_name, path in sorted(settings.apt_keyrings.items()):
        source = Path(path).expanduser()
        if not source.is_file():
            raise InventoryError(f"host {host.name}: apt_keyrings: {source} is not there: it is a file on this machine")
        kept.append(f"/usr/share/keyrings/laoka-{file_name}")
        files.put(name=f"apt keyring {file_name}", src=str(source), dest=kept[-1], mode="644")
    folder = OWN_SOURCES if settings.apt_sources_only else "/etc/apt/sources.list.d"
    for file_name, line in sorted(settings.apt_sources.items()):
        kept.append(f"{folder}/laoka-{file_name}.list")
        files.put(
            name=f"apt source {file_name}",
            src=StringIO(f"{line}\n"),
            dest=kept[-1],
            create_remote_dir=True,
        )
    for path in settings.deb_folders:
        place = f"/var/lib/laoka/apt/{path.strip('/').replace('/', '-')}"
        kept += [place, f"{folder}/laoka-folder-{place.rsplit('/', 1)[1]}.list"]
        index_debs(name=f"Index of the packages in {path}", folder=path, place=place)
        files.put(
            name=f"apt source {path}",
            src=StringIO(f"deb [trusted=yes] file:{place} ./\n"),
            dest=kept[-1],
            create_remote_dir=True,
        )
    ours = [
        "/etc/apt/sources.list.d/laoka-*.list",
        f"{OWN_SOURCES}/laoka-*.list",
        "/usr/share/keyrings/laoka-*",
        "/var/lib/laoka/apt/*",
    ]
    keep_only(name="No source of packages that the inventory had once", patterns=ours, keep=kept, lang=lang)
    apt_update_when_stale(name="apt lists are fresh", lock_wait_s=settings.apt_lock_wait_s, lang=lang)
