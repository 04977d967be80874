"""The gateway's limits, keys and configuration: out of the engine's flags, closed unless it is opened on purpose."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from laoka.serving.guard import parse_settings
from roles.gateway.config import (
    guard_settings,
    is_loopback,
    key_map,
    limits,
    parse_keys,
    quoted,
    refusals,
    split_listen,
)
from roles.gateway.deploy import TEMPLATES, GatewaySettings, Peer, checked, gateway_left_overs, haproxy_values, ports_differ
from roles.serve.deploy import Served, ServeSettings, _served, left_overs
from roles.settings import InventoryError, faults

KEYS = "# who may\nalice k-alice-0123456789\nbob-2   k-bob-0123456789ab  # his\n\n"
FLAGS = {"max-model-len": "65536", "max-num-seqs": 2}


def rendered(*, keys: bool = True, peers: tuple[Peer, ...] = (), instances: tuple[str, ...] = ("",), **settings: object) -> str:
    told = GatewaySettings(**settings)  # type: ignore[arg-type]
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined)
    values = haproxy_values(told, limits(FLAGS), instances, keys=keys, peers=peers)
    return environment.get_template("haproxy.cfg.j2").render(**values)


def lines_with(text: str, words: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if words in line and not line.strip().startswith("#")]


def test_limits_follow_the_engines_flags() -> None:
    found = limits(FLAGS)
    assert (found.seats, found.waiting, found.max_prompt_chars) == (2, 8, 8 * 65536)
    assert found.max_body_bytes == 6 * 8 * 65536 + 1024 * 1024
    assert found.first_byte_s == 60 + 2 * 65536 // 300  # both seats prefill the whole context at 300 tokens/s
    assert (found.idle_s, found.dead_after_s) == (81, 81)
    assert limits({}).seats == 8 and limits({"max-model-len": "auto"}).max_prompt_chars == 8 * 32768


def test_what_is_said_goes_before_what_follows() -> None:
    found = limits(FLAGS, seats=3, waiting=0, max_body_bytes=5, max_prompt_chars=7, first_byte_s=9, idle_s=11, dead_after_s=13)
    assert (found.seats, found.waiting, found.max_body_bytes, found.max_prompt_chars) == (3, 0, 5, 7)
    assert (found.first_byte_s, found.idle_s, found.dead_after_s) == (9, 11, 13)


def test_keys_are_read_and_only_their_hashes_are_kept() -> None:
    keys = parse_keys(KEYS, "keys")
    assert [(item.name, item.key) for item in keys] == [("alice", "k-alice-0123456789"), ("bob-2", "k-bob-0123456789ab")]
    text = key_map(keys)
    assert text.splitlines()[0] == f"{hashlib.sha256(b'k-alice-0123456789').hexdigest().upper()} alice"
    assert "0123456789ab" not in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no key in it"),
        ("alice", "f:1: write NAME KEY"),
        ("a b c", "f:1: write NAME KEY"),
        ("# x\nalice short", "f:2: the key of alice has less than 16"),
        ("ali/ce k-0123456789abcdef", "f:1: the name"),
        ("a k-0123456789abcdef\nb k-0123456789abcdef", "f:2: the key of b is another one's"),
    ],
)
def test_keys_that_can_not_be_are_told_without_the_key(text: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_keys(text, "f")
    assert says in str(error.value) and "0123456789" not in str(error.value)


@pytest.mark.parametrize(
    ("listen", "loopback"), [("127.0.0.1:8080", True), ("0.0.0.0:80", False), ("[::1]:1", True), ("[::]:1", False)]
)
def test_listen_addresses(listen: str, loopback: bool) -> None:
    assert is_loopback(listen) is loopback and split_listen(listen)[1] > 0


@pytest.mark.parametrize("listen", ["8080", "host:8080", "0.0.0.0:", "0.0.0.0:0", "0.0.0.0:70000", "1.2.3.4:x"])
def test_listen_addresses_that_are_none(listen: str) -> None:
    assert "gateway_listen" in faults("x", {"gateway_listen": listen}, [GatewaySettings], [])[0]


def test_a_door_is_not_left_open(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    here = str(tmp_path / "keys")
    assert checked("x", GatewaySettings()) == ()
    assert len(checked("x", GatewaySettings(gateway_listen="0.0.0.0:1", gateway_keys_file=here))) == 2
    for settings, says in (
        (GatewaySettings(gateway_listen="0.0.0.0:1"), "without keys"),
        (GatewaySettings(gateway_keys_file=f"{here}-none"), "No such file"),
        (GatewaySettings(gateway_group="g", gateway_keys_file=here), "other hosts can reach"),
        (GatewaySettings(gateway_tls_pem_file="/none.pem"), "/none.pem is not there"),
        (
            GatewaySettings(gateway_listen="0.0.0.0:1", gateway_keys_file=here, gateway_group="g", gateway_tls_pem_file=here),
            "gateway_tls_ca_file",
        ),
    ):
        with pytest.raises(InventoryError, match=says):
            checked("x", settings)


def test_every_path_that_is_not_named_is_closed_before_anything_else() -> None:
    rules = [line for line in rendered().splitlines() if line.strip().startswith(("http-request", "use_backend"))]
    order = [index for words in ("deny_status 404", "deny_status 401", "deny_status 413", "deny_status 429", "wait-for-body")
             for index, line in enumerate(rules) if words in line]  # fmt: skip
    assert order == sorted(order) and len(order) == 5
    assert lines_with(rendered(), "acl is_post")[0].split()[3:] == ["/v1/chat/completions", "/v1/completions"]
    assert not lines_with(rendered(keys=False), "deny_status 401")


def test_one_host_has_its_own_engine_only() -> None:
    text = rendered()
    assert lines_with(text, "server main ") == ["server main unix@/run/qwen-guard/main.sock"] and "backend group" not in text
    assert lines_with(text, "default-server")[0].startswith(
        "default-server check inter 2s downinter 500ms fall 2 rise 1 maxconn 2 "
    )
    assert "be_conn(local) ge 10 }" in text  # 2 seats and 8 places in line
    assert lines_with(text, "retry-on") == ["retry-on conn-failure empty-response"]


def test_a_group_spreads_over_its_hosts_and_asks_each_for_itself() -> None:
    peers = (Peer("b", "10.0.0.2", 8080), Peer("c", "10.0.0.3", 8443))
    text = rendered(peers=peers, gateway_listen="0.0.0.0:8080", gateway_group="g")
    assert lines_with(text, "server b ") == ["server b 10.0.0.2:8080"] and lines_with(text, "server self ") == [
        "server self 127.0.0.1:8080"
    ]
    assert "hdr X-Laoka-Hop 1" in text and "use_backend local if is_hop" in text and "be_conn(group) ge 30 }" in text
    assert lines_with(text, "retry-on") == ["retry-on conn-failure empty-response 503"]
    tls = rendered(peers=peers, gateway_listen="10.0.0.1:8443", gateway_tls_pem_file="/x", gateway_tls_ca_file="/y")
    assert lines_with(tls, "server self ") == ["server self 10.0.0.1:8443 ssl verify required ca-file /etc/haproxy/laoka/ca.pem"]
    assert "bind 10.0.0.1:8443 ssl crt /etc/haproxy/laoka/tls.pem" in tls
    # HAProxy 2.6 manual, "http-check connect": without `default` a check does not use the TLS of the server's line.
    group = tls.split("\nbackend group\n")[1].split("\nbackend ")[0]
    assert lines_with(group, "http-check connect") == ["http-check connect default"]


def test_several_engines_of_one_host_are_balanced() -> None:
    text = rendered(instances=("left", "right"))
    assert len(lines_with(text, "unix@/run/qwen-guard/")) == 2 and "be_conn(local) ge 12 }" in text
    assert len(lines_with(text, "srv_is_up(local/")) == 2


def test_the_log_format_has_no_field_for_text() -> None:
    fields = set(re.findall(r'"(\w+)":', lines_with(rendered(), "log-format")[0]))
    assert fields == {"id", "client", "from", "method", "path", "status", "ended", "server", "queue_ms", "total_ms", "sent_bytes"}


def test_errors_are_openais_json_in_haproxys_quotes() -> None:
    text = rendered()
    for item in refusals(limits(FLAGS)).values():
        assert str(item["body"]) in text
        assert "error" in json.loads(str(item["body"]).strip("'"))
    assert quoted("it's") == "'it'\\''s'"


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r\0")))
def test_quoted_texts_are_one_word_of_a_shell_too(text: str) -> None:
    assert shlex.split(quoted(text)) == [text]


def test_the_guard_reads_what_is_written_for_it() -> None:
    engines = [{"socket": "/s", "url": "http://127.0.0.1:8000", "model": "m"}]
    found = parse_settings(guard_settings(limits(FLAGS, max_tokens=5), engines))
    assert (found.engines[0].model, found.max_tokens, found.max_choices, found.send_s) == ("m", 5, 2, 60)


def test_a_gateway_on_an_engines_port_is_refused_and_words_that_would_be_lines_of_haproxys() -> None:
    ports_differ("h", "0.0.0.0:8080", [served_at(8000), served_at(8001)])
    with pytest.raises(InventoryError, match=r"h: qwen-serve@x\.service and gateway_listen both have port 8001"):
        ports_differ("h", "0.0.0.0:8001", [served_at(8000), served_at(8001)])
    for wrong in ({"gateway_address": "x\n  server evil 10.0.0.1"}, {"gateway_group": "a b"}):
        with pytest.raises(ValidationError):
            GatewaySettings(**wrong)  # type: ignore[arg-type]
    assert GatewaySettings(gateway_address="fd00::1", gateway_group="lab-1.a").gateway_group == "lab-1.a"


def served_at(port: int) -> Served:
    return Served("qwen-serve@x.service", "x", "/etc/qwen-serve/x", "qwen-serve/x", port, {}, {}, 180, "")


def goes(found: tuple[list[str], list[str]], *paths: str) -> list[str]:
    """Those of some paths of a host that would be removed."""
    return [path for path in paths if any(fnmatch(path, one.rstrip("/")) for one in found[0]) and path not in found[1]]


def test_what_goes_with_a_setting_of_the_gateway() -> None:
    folder, log = "/etc/haproxy/laoka", "/var/lib/qwen-guard/prefixes.jsonl"
    secrets = (f"{folder}/keys.map", f"{folder}/tls.pem", f"{folder}/ca.pem", "/etc/laoka/gateway-key", log, f"{log}.1")
    every = GatewaySettings(gateway_keys_file="/k", gateway_prefix_log=True)
    assert goes(gateway_left_overs(every, secrets[:3]), *secrets, f"{folder}/haproxy.cfg") == []
    assert goes(gateway_left_overs(GatewaySettings(), []), *secrets, f"{folder}/haproxy.cfg") == list(secrets)
    assert goes(gateway_left_overs(every, secrets[:1]), *secrets) == [f"{folder}/tls.pem", f"{folder}/ca.pem"]


def test_what_goes_with_a_setting_of_the_engines() -> None:
    single, a = ServeSettings(), ServeSettings(serve_api_key_file="/k")
    key, folder, main = "/etc/qwen-serve/api-key", "/etc/qwen-serve/a", "/var/lib/laoka/staged/qwen-serve.service"
    rolled = "/var/lib/laoka/rollout/qwen-serve.service"
    everything = (key, folder, "/etc/qwen-serve/vllm.yaml", "/etc/qwen-serve/env", "/run/qwen-serve/state.json", main, rolled)
    of_single = left_overs([_served(single, "", 8000, {}, {})])
    assert goes(of_single, *everything, f"{main}/api-key", f"{main}/env") == [key, folder, f"{main}/api-key"]
    with_key = left_overs([_served(a, "", 8000, {}, {})])
    assert goes(with_key, *everything, f"{main}/api-key") == [folder]
    assert goes(left_overs([_served(a, "a", 8001, {}, {})]), *everything) == list(everything[2:])
