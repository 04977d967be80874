"""The NVML sensor: the child has a deadline, one that can't be ended is not joined by others, and every fault has its name."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.agent import nvml, nvml_probe
from laoka.agent.config import Config, ExpectedGpu
from laoka.sandbox import card, packages

BDF = "0000:03:00.0"
CONFIG = Config(host="h", gpu=(ExpectedGpu(bdf=BDF, device_id="10de:1db6", uuid="GPU-1", serial="7"),), power_limit_w=175)
GOOD = {
    "bdf": "00000000:03:00.0",
    "uuid": "GPU-1",
    "serial": "7",
    "core_c": 60,
    "memory_c": 75,
    "power_limit_w": 175.0,
    "pages_pending": 0,
    "pages_retired": 0,
    "ecc_uncorrected": 0,
    "slowdown_c": 87,
    "memory_max_c": 85,
    "lost": False,
}


def answer(**changes: Any) -> dict[str, Any]:
    return {"error": 0, "driver": "580.173.02", "cards": [{**GOOD, **changes}]}


def kinds(reply: Mapping[str, Any], hot: frozenset[str] = frozenset(), config: Config = CONFIG) -> list[str]:
    reading = nvml.judge(config, reply, hot)
    assert (reading.verdict == "bad") == bool(reading.signals)
    return [signal.kind for signal in reading.signals]


def test_good() -> None:
    assert nvml.judge(CONFIG, answer()).verdict == "ok"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"memory_c": 85}, "heat"),  # the limit of an HBM2 V100
        ({"core_c": 87}, "heat"),
        ({"memory_c": 92, "memory_max_c": None}, "heat"),  # the card does not say: the catalogue has 85
        ({"pages_pending": 1, "pages_retired": 3}, "pages_pending"),
        ({"ecc_uncorrected": 2}, "ecc_uncorrected"),
        ({"power_limit_w": 250.0}, "power_cap"),  # what a card comes back with after it fell off
        ({"uuid": "GPU-2"}, "card_swapped"),
        ({"serial": "8"}, "card_swapped"),
        ({"lost": True}, "nvml_lost"),
        ({"bdf": "00000000:04:00.0"}, "nvml_missing"),
        ({"bdf": None}, "nvml_missing"),
    ],
)
def test_card_faults(changes: dict[str, Any], kind: str) -> None:
    assert kinds(answer(**changes)) == [kind]


@pytest.mark.parametrize(
    ("error", "kind"), [(9, "nvml_not_loaded"), (12, "nvml_no_library"), (18, "nvml_mismatch"), (999, "nvml_failed")]
)
def test_driver_faults(error: int, kind: str) -> None:
    assert kinds({"error": error, "words": "w"}) == [kind]


def test_heat_ends_below_the_limit_not_at_it() -> None:
    hot = nvml.hot_cards(nvml.judge(CONFIG, answer(memory_c=86)).signals)
    assert hot == {BDF}
    assert kinds(answer(memory_c=84)) == []
    assert kinds(answer(memory_c=84), hot) == ["heat"]
    assert kinds(answer(memory_c=81), hot) == []


def test_no_limit_is_invented_for_a_card_without_a_source() -> None:
    config = Config(host="h", gpu=(ExpectedGpu(bdf=BDF, device_id="10de:1db5"),))
    assert kinds(answer(memory_c=120, core_c=120, slowdown_c=None, memory_max_c=None), config=config) == []


def test_no_answer_is_unknown_not_ok() -> None:
    assert nvml.judge(CONFIG, answer(faults={"memory_c": 999})).verdict == "unknown"
    assert nvml.judge(CONFIG, {"broken": "why"}).verdict == "unknown"


@given(
    st.dictionaries(
        st.sampled_from(["error", "words", "cards", "driver"]),
        st.none()
        | st.integers()
        | st.lists(st.dictionaries(st.sampled_from([*GOOD]), st.none() | st.integers(0, 200)), max_size=2),
    )
)
def test_no_answer_is_ok_by_accident(reply: dict[str, Any]) -> None:
    assert nvml.judge(CONFIG, reply).verdict in ("bad", "unknown")


# ---- the child ----


def sleeps() -> dict[str, Any]:
    time.sleep(60)
    return {}


def test_a_child_that_hangs_is_ended_at_its_deadline() -> None:
    asker = nvml_probe.Asker(sleeps)
    started = time.monotonic()
    assert asker.ask(0.2) == {"hung": 0}
    assert time.monotonic() - started < 3
    assert asker.hung == []
    assert kinds({"hung": 0}) == ["nvml_hung"]


def test_a_child_that_can_not_be_ended_is_not_joined_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a child in D state, which SIGKILL does not end: no signal arrives.
    killed: list[int] = []
    real = os.kill
    monkeypatch.setattr(nvml_probe, "KILL_WAIT_S", 0.05)
    monkeypatch.setattr(nvml_probe.os, "kill", lambda pid, number: killed.append(pid))
    asker = nvml_probe.Asker(sleeps)
    assert [asker.ask(0.01) for _ in range(3)] == [{"hung": 1}] * 3
    (pid,) = set(killed)
    assert asker.hung == [pid] and len(killed) == 1
    real(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    asker.probe = lambda: {"error": 0}
    assert asker.ask(10) == {"error": 0}


def test_a_child_that_dies_or_says_nonsense_is_broken() -> None:
    def dies() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    assert nvml_probe.Asker(dies).ask(10) == {"broken": "the NVML child ended with status -9 and no answer"}
    assert "no answer" in nvml_probe.Asker(lambda: 1 / 0).ask(10)["broken"]  # type: ignore[arg-type, return-value]
    assert "no answer" in nvml_probe.Asker(list).ask(10)["broken"]  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("code", ["print('x')", "input(); print('x')", "print('[]')", "raise SystemExit(3)"])
def test_a_process_that_does_not_answer_is_broken_and_started_again(code: str) -> None:
    prober = nvml.Prober(10, (sys.executable, "-c", code))
    assert "gave no answer" in prober.ask()["broken"]
    assert prober.asker is None
    assert "gave no answer" in prober.ask()["broken"]


def test_the_process_that_asks_is_kept_and_ends_with_us(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(),))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("LAOKA_SANDBOX_GPU_CONF", str(tmp_path / "gpu.conf"))
    prober = nvml.Prober(10)
    assert prober.ask()["error"] == 0
    first = prober.asker
    assert first is not None and prober.ask()["error"] == 0 and prober.asker is first
    maps = Path(f"/proc/{first.pid}/maps").read_text()
    assert "libnvidia-ml" not in maps, "it is loaded by the child alone"
    first.kill()
    first.wait()
    assert "gave no answer" in prober.ask()["broken"] and prober.ask()["error"] == 0
    second = prober.asker
    assert second is not None and second is not first
    assert prober.close() == "ended with status 0" and second.poll() == 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    packages.compile_nvml(folder / "libnvidia-ml.so.1", "580.173.02")
    return folder


def test_the_real_child_against_the_simulated_library(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = card.v100_pcie_32gb()
    card.create(tmp_path, (gpu,))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("LAOKA_SANDBOX_GPU_CONF", str(tmp_path / "gpu.conf"))
    config = Config(host="h", gpu=(ExpectedGpu(bdf=gpu.bdf, device_id=gpu.device_id, uuid=gpu.uuid, serial=gpu.serial),))
    prober = nvml.Prober(10)

    def now() -> list[str]:
        return kinds(prober.ask(), config=config)

    assert now() == []
    for fault, found in (
        ("hot", ["heat"]),
        ("ecc-pending", ["pages_pending"]),
        ("off-bus", ["nvml_lost"]),
        ("card-gone", ["nvml_missing"]),
        ("driver-mismatch", ["nvml_mismatch"]),
    ):
        card.apply_fault(tmp_path, fault, gpu.bdf)
        assert now() == found, fault
        card.clear_fault(tmp_path, fault, gpu.bdf)
    card.apply_fault(tmp_path, "nvml-hung", gpu.bdf)
    prober.deadline_s = 0.5
    assert now() == ["nvml_hung"]
    card.clear_fault(tmp_path, "nvml-hung", gpu.bdf)
    prober.deadline_s = 10
    assert now() == []


def test_without_a_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that no machine has, so that the test says the same on one with a driver.
    code = (
        "import ctypes, json, runpy, pynvml\n"
        "real = ctypes.CDLL\n"
        "def missing(name, *a, **k):\n"
        "    if 'nvidia-ml' in str(name): raise OSError(name)\n"
        "    return real(name, *a, **k)\n"
        "pynvml.CDLL = missing\n"
        "runpy.run_module('laoka.agent.nvml_probe', run_name='__main__')\n"
    )
    prober = nvml.Prober(10, (sys.executable, "-c", code))
    assert kinds(prober.ask()) == ["nvml_no_library"]
    prober.close()
