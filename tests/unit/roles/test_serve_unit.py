"""qwen-serve's unit: right for each version of systemd, without fault by systemd's own check, and cut down to what it needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest
from pydantic import ValidationError

from roles.serve.deploy import LEAST_FROZEN_S, TEMPLATES, Served, ServeInstance, ServeSettings, _served, unit_values
from roles.serve.unit import (
    DEFAULT_ENV,
    NVIDIA_GROUPS,
    SINCE,
    flags_of,
    known_keys,
    longest_silence_s,
    restart_keys,
    systemd_version,
    tokens_of,
    visible_devices,
)
from roles.settings import faults

VERSIONS = (249, 252, 255, 257)  # Ubuntu 22.04, Debian 12, Ubuntu 24.04, Debian 13
MAX_EXPOSURE_TENTHS = 17


def one(name: str = "", **settings: object) -> tuple[ServeSettings, Served]:
    told = ServeSettings(**settings)  # type: ignore[arg-type]
    return told, _served(told, name, 8000, {"max-model-len": 4096}, {})


def rendered(version: int, *, gpus: bool = True, name: str = "", **settings: object) -> str:
    told, served = one(name, **settings)
    return template("qwen-serve.service.j2").render(**unit_values(told, served, version, gpus=gpus))


def template(name: str) -> jinja2.Template:
    # As pyinfra renders: an undefined name is an error.
    loader = jinja2.FileSystemLoader(TEMPLATES)
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).get_template(name)


def keys_of(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_only_keys_that_this_systemd_knows(version: int) -> None:
    keys = keys_of(rendered(version, serve_api_key_file="/k"))
    assert [key for key in keys if SINCE.get(key, 0) > version] == []
    assert ("RestartSteps" in keys) == (version >= 254)
    assert keys["Restart"] == ["always"] and keys["StartLimitIntervalSec"] == ["0"]


def test_the_oldest_gets_no_key_that_is_newer() -> None:
    assert known_keys({"RestartSteps": "6", "Restart": "always"}, 249) == {"Restart": "always"}
    assert restart_keys(252) == {"RestartSec": "10s"}
    assert restart_keys(255) == {"RestartSec": "5s", "RestartSteps": "6", "RestartMaxDelaySec": "5min"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("systemd 252 (252.39-1~deb12u2)", 252),
        ("systemd 249 (249.11-0ubuntu3.12)", 249),
        ("systemd 257~rc1", 257),
        ("", 249),
        ("no", 249),
    ],
)
def test_versions_as_systemctl_prints_them(text: str, version: int) -> None:
    assert systemd_version(text) == version


def analyze(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    assert shutil.which("systemd-analyze"), "apt-get install systemd"
    return subprocess.run(["systemd-analyze", "--no-pager", *words], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def unit_file(tmp_path: Path) -> Path:
    """The unit for the systemd of this machine, its programs replaced by one that is here (the check asks whether they are)."""
    done = analyze(tmp_path, "--version")
    text = rendered(systemd_version(done.stdout), serve_api_key_file="/k")
    (tmp_path / "qwen-serve-failed@.service").write_text(template("qwen-serve-failed@.service.j2").render(python="/bin/true"))
    path = tmp_path / "qwen-serve.service"
    path.write_text(re.sub(r"/opt/laoka/\S+/(?:python|vllm)", "/bin/true", text))
    return path


def test_systemds_own_check_finds_no_fault(unit_file: Path) -> None:
    done = analyze(unit_file.parent, "verify", "--man=no", "--recursive-errors=no", str(unit_file))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemds_own_check_would_find_a_key_that_it_does_not_know(unit_file: Path) -> None:
    unit_file.write_text(unit_file.read_text().replace("[Service]\n", "[Service]\nNoSuchKey=1\n"))
    done = analyze(unit_file.parent, "verify", "--man=no", "--recursive-errors=no", str(unit_file))
    assert done.returncode == 1 and "NoSuchKey" in done.stderr


def test_the_exposure_is_what_the_docs_say(unit_file: Path) -> None:
    score = ["security", "--offline=true", f"--threshold={MAX_EXPOSURE_TENTHS}", str(unit_file)]
    done = analyze(unit_file.parent, *score)
    assert done.returncode == 0, done.stdout[-300:]
    plain = unit_file.with_name("plain.service")
    plain.write_text("[Service]\nExecStart=/bin/true\n")
    assert analyze(unit_file.parent, *score[:-1], str(plain)).returncode != 0


def test_no_shell_no_secret_and_the_flags_in_a_file() -> None:
    keys = keys_of(rendered(252, serve_api_key_file="~/secrets/engine-key"))
    commands = [value for key in keys if key.startswith("Exec") for value in keys[key]]
    assert len(commands) == 3 and not any("sh -c" in command or "secrets" in command for command in commands)
    assert keys["ExecStart"][0].endswith("-- /opt/laoka/engines/current/bin/vllm serve --config /etc/qwen-serve/vllm.yaml")
    assert keys["LoadCredential"] == ["api-key:/etc/qwen-serve/api-key"]
    assert "LoadCredential" not in keys_of(rendered(252))


def test_what_the_host_must_be_safe_from() -> None:
    keys = keys_of(rendered(252, serve_shutdown_s=20, serve_start_deadline_s=600))
    wanted = {
        "KillMode": "mixed", "MemoryMax": "90%", "OOMPolicy": "kill", "OOMScoreAdjust": "300", "User": "qwen", "Type": "notify",
        "RestartPreventExitStatus": "2", "TimeoutStartSec": "630s", "TimeoutStopSec": "35s", "ProtectSystem": "strict",
        "PrivateTmp": "yes", "OnFailure": "qwen-serve-failed@%n.service", "NoNewPrivileges": "yes", "CapabilityBoundingSet": "",
    }  # fmt: skip
    assert {key: keys[key][0] for key in wanted} == wanted
    after = keys["After"][0].split()
    assert {"network-online.target", "nvidia-persistenced.service", "laoka-power.service"} <= set(after)
    assert "--start-deadline-s 600 " in keys["ExecStart"][0]  # the supervisor's comes first, and what the engine gets is as long
    of_measured = keys_of(rendered(252))
    assert of_measured["TimeoutStartSec"] == ["1230s"] and "--start-deadline-s" not in of_measured["ExecStart"][0]


def test_only_a_host_with_cards_gets_their_devices() -> None:
    assert [line.split()[0] for line in keys_of(rendered(252))["DeviceAllow"]] == list(NVIDIA_GROUPS)
    without = rendered(252, gpus=False)
    said = [line for line in without.splitlines() if not line.startswith("#")]
    assert not any("nvidia" in line for line in said) and keys_of(without)["DevicePolicy"] == ["closed"]


def test_an_instance_has_everything_of_its_own_and_belongs_to_the_whole() -> None:
    text = rendered(252, name="left")
    keys = keys_of(text)
    assert keys["PartOf"] == ["qwen-serve.service"] and keys["RuntimeDirectory"] == keys["StateDirectory"] == ["qwen-serve/left"]
    assert "--unit qwen-serve@left.service" in keys["ExecStart"][0] and "/etc/qwen-serve/left/vllm.yaml" in keys["ExecStart"][0]
    whole = template("qwen-serve-all.service.j2").render(units=["qwen-serve@left.service", "qwen-serve@right.service"])
    found = keys_of(whole)
    assert found["After"] == found["Wants"] == ["qwen-serve@left.service qwen-serve@right.service"]
    assert len(found["ExecStart"]) == 2 and found["Type"] == ["oneshot"]


def test_flags_file_is_yaml_that_json_reads_line_by_line() -> None:
    flags = {"max-model-len": 4096, "enforce-eager": True, "speculative-config": '{"method": "mtp"}', "dtype": "half"}
    text = template("vllm.yaml.j2").render(model="/m", served_model_name="a:b", port=8000, flags=flags)
    pairs = [line.split(": ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert pairs.pop(2) == ["host", "127.0.0.1"]
    read = {key: json.loads(value) for key, value in pairs}
    assert read == {"model": "/m", "served-model-name": "a:b", "port": 8000, **flags}


def test_flags_inventory_over_lock_over_defaults() -> None:
    flags = flags_of({"max-num-seqs": "4", "dtype": "half"}, {"max-num-seqs": 2}, shutdown_s=30)
    assert (flags["max-num-seqs"], flags["dtype"], flags["shutdown-timeout"]) == (2, "half", 30)
    assert "/health" in flags["disable-access-log-for-endpoints"]


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ({}, 81),  # 3 x 8192 tokens at 300 a second
        ({"max-num-batched-tokens": 2048}, 30),
        ({"max-num-batched-tokens": "16k"}, 160),
        ({"no-enable-chunked-prefill": True, "max-model-len": 65536}, 655),
        ({"enable-chunked-prefill": False, "max-model-len": "64K"}, 655),
        ({"enable-chunked-prefill": False, "max-model-len": "auto"}, 81),
    ],
)
def test_how_long_a_healthy_engine_may_be_silent(flags: dict[str, object], seconds: int) -> None:
    assert longest_silence_s(flags) == seconds


def test_counts_as_vllm_takes_them() -> None:
    assert [tokens_of(text, 1) for text in ("8k", "8K", 4096, "2m", "auto", "-5", None)] == [8000, 8192, 4096, 2000000, 1, 1, 1]


def test_a_frozen_engine_is_given_longer_than_vllm_gives_its_worker() -> None:
    worker_s = int(DEFAULT_ENV["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"])
    assert worker_s < 300, "vLLM's default (vllm/envs.py)"
    assert one()[1].frozen_after_s == LEAST_FROZEN_S > worker_s
    assert one(serve_frozen_after_s=0)[1].frozen_after_s == 0


BDFS = ["0000:04:00.0", "0000:03:00.0", "0000:84:00.0"]


def test_cards_of_an_instance() -> None:
    assert visible_devices(BDFS, {}, ["0000:84:00.0", "0000:03:00.0"]) == "2,0"
    uuids = {"0000:03:00.0": "GPU-a", "0000:84:00.0": "GPU-b", "0000:04:00.0": ""}
    assert visible_devices(BDFS, uuids, ["0000:84:00.0", "0000:03:00.0"]) == "GPU-b,GPU-a"
    assert visible_devices(BDFS, uuids, ["0000:04:00.0"]) == "1"
    with pytest.raises(ValueError, match="0000:05"):
        visible_devices(BDFS, {}, ["0000:05:00.0"])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"serve_instances": {"a": {"port": 1}, "b": {"port": 1}}}, "two instances have the same port"),
        ({"serve_instances": {"A b": {"port": 1}}}, "match pattern"),
        ({"serve_instances": {"a": {"port": 1, "gpu": []}}}, "did you mean gpus?"),
        ({"serve_memory_max": "lots"}, "match pattern"),
        ({"serve_port": 70000}, "less than 65536"),
        ({"served_model_name": "a b"}, "match pattern"),
    ],
)
def test_settings_that_can_not_be(data: dict[str, object], says: str) -> None:
    assert says in faults("x", data, [ServeSettings], [])[0]
    assert ServeInstance(port=5).gpus == ()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"serve_flags": {"host": "0.0.0.0"}}, "host is not for you to set: the engine listens on loopback only"),
        ({"serve_flags": {"served_model_name": "x"}}, "set served_model_name"),
        ({"serve_flags": {"api-key": "k"}}, "set serve_api_key_file"),
        ({"serve_flags": {"--max-model-len": 1}}, "write it without the dashes"),
        ({"serve_flags": {"seed: 1\nhost": "0.0.0.0"}}, "is no flag"),
        ({"serve_instances": {"a": {"port": 8001, "flags": {"port": 9}}}}, "set serve_port, or an instance's port"),
        ({"serve_instances": {"a": {"port": 8001, "env": {"VLLM_API_KEY": "k"}}}}, "set serve_api_key_file"),
        ({"serve_instances": {"api-key": {"port": 8001}}}, "can't be an instance's name"),
        ({"serve_env": {"A": "x\nVLLM_API_KEY=k"}}, "its value has more than one line"),
        ({"serve_env": {"A B": "x"}}, "is no name of a variable"),
        ({"serve_env": {"VLLM_SERVER_DEV_MODE": "1"}}, "pause the engine to whoever asks"),
        ({"serve_shutdown_s": -1}, "serve_shutdown_s"),
        ({"serve_drain_s": -1}, "serve_drain_s"),
        ({"serve_frozen_after_s": -1}, "serve_frozen_after_s"),
        ({"serve_start_deadline_s": 0}, "serve_start_deadline_s"),
    ],
)
def test_what_would_open_the_engine_or_break_its_files_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        ServeSettings(**settings)  # type: ignore[arg-type]


def test_flags_of_either_spelling_and_usual_variables_are_taken() -> None:
    told = ServeSettings(serve_flags={"max_model_len": "8k", "no-enable-prefix-caching": True}, serve_env={"NCCL_DEBUG": "INFO"})
    assert told.serve_flags["max_model_len"] == "8k"
