"""The front door: HAProxy for keys, paths, sizes, the queue and the choice of a server; a guard that reads requests behind it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator
from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host
from pyinfra.context import host, state
from pyinfra.operations import files, server

from laoka.catalog.messages import language
from laoka.operations.rollout import as_unit
from laoka.operations.steps import apt_install, checked_file, http_test, keep_only, run_unit
from roles.agent.deploy import HOME, PYTHON
from roles.base.deploy import BaseSettings
from roles.gateway.config import (
    GET_PATHS,
    POST_PATHS,
    PREFIX_LOG,
    Key,
    Limits,
    guard_settings,
    is_loopback,
    key_map,
    limits,
    parse_keys,
    refusals,
    split_listen,
)
from roles.secrets import secret_file
from roles.serve.deploy import Served, ServeSettings, left_overs, served
from roles.settings import InventoryError, RoleSettings, data_of

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "gateway"
CONFIG = "/etc/haproxy/haproxy.cfg"
FOLDER = "/etc/haproxy/laoka"
STAGED = f"{FOLDER}/haproxy.cfg"
GUARD = "qwen-guard.service"
GUARD_SETTINGS = "/etc/qwen-guard/settings.json"
SOCKETS = "/run/qwen-guard"
LOCAL_KEY = "/etc/laoka/gateway-key"


class GatewaySettings(RoleSettings):
    """Settings of the gateway."""

    gateway_listen: str = "127.0.0.1:8080"
    """Address and port that clients use, such as 0.0.0.0:8080; beyond the host itself only with keys."""
    gateway_keys_file: str | None = None
    """File on your machine (or env:NAME, sops:FILE) with clients' keys, `NAME KEY` a line; hosts get hashes. None: on loopback."""
    gateway_tls_pem_file: str | None = None
    """File on your machine with certificate chain and private key in PEM; None: no TLS."""
    gateway_tls_ca_file: str | None = None
    """Certificate that the gateways of a group know each other's by; needed for TLS in a group."""
    gateway_group: str | None = Field(None, pattern=r"^[\w.-]+$")
    """Hosts with the same name here are one: each of their gateways spreads requests over all of them."""
    gateway_address: str | None = Field(None, pattern=r"^[\w.:\[\]-]+$")
    """Address by which the group's other hosts reach this one; None takes ssh_hostname."""
    gateway_max_requests: int | None = Field(None, gt=0)
    """Requests in one engine at once; None takes max-num-seqs of the flags."""
    gateway_max_waiting: int | None = Field(None, ge=0)
    """Requests that may wait in line beyond them; more get 429. None: four times gateway_max_requests."""
    gateway_queue_s: int = Field(60, gt=0)
    """How long a request may wait in line."""
    gateway_max_body_bytes: int | None = Field(None, gt=0)
    """Largest request; None: what the longest prompt takes, and a MiB."""
    gateway_max_prompt_chars: int | None = Field(None, gt=0)
    """Longest prompt in characters; None: 8 for each token of max-model-len. The exact count of tokens is the engine's."""
    gateway_first_byte_s: int | None = Field(None, gt=0)
    """How long an answer may take to begin; None: a prefill of the whole context in every seat, at 300 tokens/s, and a minute."""
    gateway_idle_s: int | None = Field(None, gt=0)
    """The longest gap within an answer; None: 60, or more for long steps of prefill."""
    gateway_dead_after_s: int | None = Field(None, gt=0)
    """Seconds without a sign of life until requests go elsewhere; None: three of the longest steps of prefill, at least 30."""

    gateway_prefix_log: bool = False
    """Note keyed hashes of prompts' token blocks on the host, never text, for `laoka cache`; it tokenizes each prompt once more."""

    @field_validator("gateway_listen")
    @classmethod
    def _is_an_address(cls, listen: str) -> str:
        split_listen(listen)
        return listen


@dataclass(frozen=True)
class Peer:
    """Another host of the group."""

    name: str
    address: str
    port: int


def peers_of(on: Host, hosts: Iterable[Host]) -> tuple[Peer, ...]:
    """The other hosts of a host's group. Errors: InventoryError when they can't serve the same."""
    settings = GatewaySettings.of(on)
    if settings.gateway_group is None:
        return ()
    model = ServeSettings.of(on).served_model_name
    found = []
    for other in hosts:
        theirs = GatewaySettings.of(other)
        if other.name == on.name or theirs.gateway_group != settings.gateway_group:
            continue
        if ServeSettings.of(other).served_model_name != model or theirs.gateway_keys_file != settings.gateway_keys_file:
            raise InventoryError(
                f"host {on.name}: {other.name} of group {settings.gateway_group} has another served_model_name or gateway_keys_file"
            )
        address = theirs.gateway_address or str(data_of(other).get("ssh_hostname") or other.name)
        found.append(Peer(other.name, address, split_listen(theirs.gateway_listen)[1]))
    return tuple(sorted(found, key=lambda peer: peer.name))


def checked(name: str, settings: GatewaySettings) -> tuple[Key, ...]:
    """The keys of a host's gateway. Errors: InventoryError for settings that would leave a door open, or that contradict."""
    loopback = is_loopback(settings.gateway_listen)
    if settings.gateway_keys_file is None and not loopback:
        raise InventoryError(
            f"host {name}: gateway_listen {settings.gateway_listen} is open to others without keys: set gateway_keys_file"
        )
    if settings.gateway_group is not None and loopback:
        raise InventoryError(f"host {name}: gateway_group needs a gateway_listen that the other hosts can reach")
    if settings.gateway_group is not None and settings.gateway_tls_pem_file and not settings.gateway_tls_ca_file:
        raise InventoryError(f"host {name}: TLS in a gateway_group needs gateway_tls_ca_file")
    for path in (settings.gateway_tls_pem_file, settings.gateway_tls_ca_file):
        if path is not None and not Path(path).expanduser().is_file():
            raise InventoryError(f"host {name}: {path} is not there")
    if settings.gateway_keys_file is None:
        return ()
    try:
        return parse_keys(secret_file(settings.gateway_keys_file), settings.gateway_keys_file)
    except ValueError as error:
        raise InventoryError(f"host {name}: gateway_keys_file: {error}") from None


def gateway_left_overs(settings: GatewaySettings, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """What a host may have of gateway settings that it had once: patterns of the shell, and which of their paths stay.

    Arguments: `names` are the files that HAProxy reads beside its configuration.
    """
    keep = [*names, *([LOCAL_KEY] if settings.gateway_keys_file else [])]
    keep += [PREFIX_LOG, f"{PREFIX_LOG}.1"] if settings.gateway_prefix_log else []
    return [f"{FOLDER}/keys.map", f"{FOLDER}/*.pem", LOCAL_KEY, f"{PREFIX_LOG}*"], keep


def ports_differ(name: str, listen: str, servers: Iterable[Served]) -> None:
    """Errors: InventoryError when the gateway would listen where an engine does."""
    port = split_listen(listen)[1]
    for one in servers:
        if one.port == port:
            raise InventoryError(f"host {name}: {one.unit} and gateway_listen both have port {port}: give the gateway another one")


def limits_of(on: Host) -> Limits:
    """The limits of a host's gateway."""
    own, serving = GatewaySettings.of(on), ServeSettings.of(on)
    return limits(
        served(on)[0].flags,
        seats=own.gateway_max_requests,
        waiting=own.gateway_max_waiting,
        queue_s=own.gateway_queue_s,
        max_body_bytes=own.gateway_max_body_bytes,
        max_prompt_chars=own.gateway_max_prompt_chars,
        max_tokens=serving.serve_max_tokens,
        first_byte_s=own.gateway_first_byte_s,
        idle_s=own.gateway_idle_s,
        dead_after_s=own.gateway_dead_after_s,
    )


@deploy("Gateway")
def gateway() -> None:
    """HAProxy and the guard, with what is on disk now, and the model's name seen through them."""
    settings, serving = GatewaySettings.of(host), ServeSettings.of(host)
    keys = checked(host.name, settings)
    ports_differ(host.name, settings.gateway_listen, served(host))
    peers = peers_of(host, state.inventory)
    base = BaseSettings.of(host)
    apt_install(name="HAProxy", packages=["haproxy"], lock_wait_s=base.apt_lock_wait_s, lang=language(base.lang))
    _guard(limits_of(host))
    names = _haproxy(settings, keys, peers)
    scheme = "https" if settings.gateway_tls_pem_file else "http"
    port = split_listen(settings.gateway_listen)[1]
    run_unit(
        name="haproxy runs, and the model answers through it",
        unit="haproxy.service",
        config=[],
        reload=[CONFIG, *names],
        test=http_test(f"{scheme}://127.0.0.1:{port}/v1/models", serving.served_model_name, key=LOCAL_KEY if keys else ""),
        test_deadline_s=60,
        _timeout=120,
    )
    # At the end: what reads them was changed before.
    of_gateway, of_engines = gateway_left_overs(settings, names), left_overs(served(host))
    keep_only(
        name="No key, certificate or file that the inventory had once",
        patterns=[*of_gateway[0], *of_engines[0]],
        keep=[*of_gateway[1], *of_engines[1]],
        lang=language(BaseSettings.of(host).lang),
    )


def _guard(found: Limits) -> None:
    server.user(  # noqa: S604 - `shell` is the user's login shell
        name="User for the guard", user="qwen-guard", system=True, home="/nonexistent", shell="/usr/sbin/nologin", create_home=False
    )
    engines = [
        {"socket": socket_of(one.instance), "url": one.url, "model": ServeSettings.of(host).served_model_name}
        for one in served(host)
    ]
    files.put(
        name="The guard's settings",
        src=StringIO(guard_settings(found, engines, prefix_log=GatewaySettings.of(host).gateway_prefix_log)),
        dest=GUARD_SETTINGS,
        mode="644",
    )
    key = served(host)[0].key
    files.template(
        name="The guard's unit", src=str(TEMPLATES / "qwen-guard.service.j2"), dest=f"/etc/systemd/system/{GUARD}", mode="644",
        python=PYTHON, settings=GUARD_SETTINGS, key=key, stop_s=30, engines=engines,
    )  # fmt: skip
    listed = " ".join(engine["socket"] for engine in engines)
    config = [f"/etc/systemd/system/{GUARD}", f"{HOME}/current", *([key] if key else [])]
    drain_s = ServeSettings.of(host).serve_drain_s
    words = [PYTHON, "-m", "laoka.serving.rollout", "--unit", GUARD, "--config", *config, "--drain-deadline-s", str(drain_s),
             "--restart-deadline-s", "90"]  # fmt: skip
    run_unit(
        name="The guard runs; one that has to be restarted is drained before, one host at a time",
        unit=GUARD,
        config=config,
        reload=[GUARD_SETTINGS],
        change=as_unit(GUARD, shlex.join(words)),
        test=f"for s in {listed}; do curl -sf -m 5 --unix-socket $s http://localhost/health || exit 1; done",
        _serial=True,
        _timeout=drain_s + 480,
    )


def _haproxy(settings: GatewaySettings, keys: tuple[Key, ...], peers: tuple[Peer, ...]) -> list[str]:
    """HAProxy's files; returns those that it reads beside its configuration."""
    names = []
    if keys:
        files.put(name="Clients' keys, hashed", src=StringIO(key_map(keys)), dest=f"{FOLDER}/keys.map", mode="600")
        files.put(name="A key for this host's own tools", src=StringIO(f"{keys[0].key}\n"), dest=LOCAL_KEY, mode="600")
        names.append(f"{FOLDER}/keys.map")
    for path, name in ((settings.gateway_tls_pem_file, "tls.pem"), (settings.gateway_tls_ca_file, "ca.pem")):
        if path is not None:
            files.put(name=f"TLS: {name}", src=str(Path(path).expanduser()), dest=f"{FOLDER}/{name}", mode="600")
            names.append(f"{FOLDER}/{name}")
    instances = [one.instance for one in served(host)]
    files.template(
        name="Configuration", src=str(TEMPLATES / "haproxy.cfg.j2"), dest=STAGED, mode="600",
        **haproxy_values(settings, limits_of(host), instances, keys=bool(keys), peers=peers),
    )  # fmt: skip
    checked_file(name="HAProxy finds no fault with it", source=STAGED, path=CONFIG, check=f"haproxy -c -q -f {STAGED}")
    return names


def haproxy_values(
    settings: GatewaySettings, found: Limits, instances: Sequence[str], *, keys: bool, peers: Sequence[Peer]
) -> dict[str, Any]:
    """What HAProxy's template is rendered with. `instances` are the names of the host's engines, "" for the only one."""
    tls = settings.gateway_tls_pem_file is not None
    return {
        "listen": settings.gateway_listen, "folder": FOLDER, "post_paths": POST_PATHS, "get_paths": GET_PATHS, "limits": found,
        "refusals": refusals(found), "keys": keys, "peers": peers, "tls": tls,
        "tls_server": f" ssl verify required ca-file {FOLDER}/ca.pem" if tls else "",
        "engines": [{"name": name or "main", "socket": socket_of(name)} for name in instances],
    }  # fmt: skip


def socket_of(instance: str) -> str:
    """The guard's socket for one engine."""
    return f"{SOCKETS}/{instance or 'main'}.sock"
