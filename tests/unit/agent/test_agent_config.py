"""The watchdog's settings: what is wrong is told in one line with the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.agent.config import Config, ConfigError, ExpectedGpu, load_config

GOOD = """
host = "v100-1"
lang = "zh"
simulated = true
alert_urls_file = "/etc/laoka/alert-urls"
completion_url = "http://127.0.0.1:8000"
completion_model = "qwen"
completion_interval_s = 60
power_limit_w = 175

[[gpu]]
bdf = "00000000:03:00.0"
device_id = "10DE:1db6"
slot = "top"
"""


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "watchdog.toml"
    path.write_text(text)
    return load_config(path)


def test_good(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.gpu == (ExpectedGpu(bdf="0000:03:00.0", device_id="10de:1db6", slot="top"),)
    assert (config.lang, config.power_limit_w, config.completion_interval_s) == ("zh", 175.0, 60.0)
    assert (config.metrics_address, config.kernel_log, config.drill) == ("127.0.0.1:9835", "/dev/kmsg", False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hots = 'x'", "unknown key hots: did you mean host?"),
        ("completion_modell = 'x'", "unknown key completion_modell: did you mean completion_model?"),
        ("zzz = 1", "unknown key zzz: there are: host, "),
        ("drill = 'yes'", "drill: is 'yes', not bool"),
        ("nvml = 'maybe'", "nvml: is 'maybe', not one of required, off"),
        ("pci_interval_s = 0", "pci_interval_s must be above zero"),
        ("metrics_address = '9835'", "metrics_address '9835' is not like 127.0.0.1:9835"),
        ("alerts_per_hour = 0", "alerts_per_hour must be 1 or more"),
        ("[[gpu]]\nbdf = 'top'\ndevice_id = '10de:1db6'", "[[gpu]] 1: bdf 'top' is not a PCI address"),
        ("[[gpu]]\nbdf = '0000:03:00.0'\ndevice_id = 'V100'", "[[gpu]] 1: device_id 'V100' is not a PCI id"),
        ("[[gpu]]\nbdf = '0000:03:00.0'\ndevice_id = '10de:1db6'\nslott = 'x'", "[[gpu]] 1: unknown key slott: did you mean slot?"),
        ("[[gpu]]\nbdf = '0000:03:00.0'", "device_id is missing"),
        ("gpu = 3", "gpu: is 3, not a list"),
        ("=", "watchdog.toml: "),
    ],
)
def test_bad(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"host = 'h'\n{line}\n")
    message = str(caught.value)
    assert words in message
    assert "watchdog.toml" in message
    assert "\n" not in message


def test_two_cards_at_one_address(tmp_path: Path) -> None:
    card = "[[gpu]]\nbdf = '0000:03:00.0'\ndevice_id = '10de:1db6'\n"
    with pytest.raises(ConfigError, match="stands twice"):
        load(tmp_path, f"host = 'h'\n{card}{card}")


def test_completion_needs_a_model_and_the_host_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="completion_model is missing"):
        load(tmp_path, "host = 'h'\ncompletion_url = 'http://127.0.0.1:8000'\n")
    with pytest.raises(ConfigError, match="host is empty"):
        load(tmp_path, "host = ' '\n")
    with pytest.raises(ConfigError, match="host is missing"):
        load(tmp_path, "")
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")
