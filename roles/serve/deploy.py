"""qwen-serve: the unit that serves the model on loopback, and is up only when a real completion came back."""

from __future__ import annotations

from pathlib import Path

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files, server

from laoka.operations.steps import completion_test, run_unit
from roles.agent.deploy import PYTHON
from roles.engine.commands import ENGINES
from roles.model.deploy import CURRENT
from roles.settings import RoleSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "serve"
USER = "qwen"
UNIT = "qwen-serve.service"


class ServeSettings(RoleSettings):
    """Settings of the model server."""

    served_model_name: str = "qwen"
    """The name that clients ask for."""
    serve_port: int = 8000
    """Port of the engine on 127.0.0.1; people use the gateway's."""
    serve_flags: dict[str, str | int | float | bool] = {}
    """Flags of `vllm serve`, without the dashes: {"max-model-len": 32768}."""
    serve_env: dict[str, str] = {}
    """Environment of the engine."""
    serve_start_deadline_s: int = 1200
    """How long a start may take until the first completion; a cold start on 4 V100 was 271 s (1Cat-vLLM 1.5.1)."""
    serve_judge_text: bool = True
    """Whether an answer that looks like garbage counts as ill; off only for a model of random weights."""


@deploy("Serve")
def serve() -> None:
    """Render the unit, run it with what is on disk now, and have it answer."""
    settings = ServeSettings.of(host)
    server.user(  # noqa: S604 - `shell` is the user's login shell
        name="User for the engine",
        user=USER,
        system=True,
        home="/var/lib/qwen-serve",
        shell="/usr/sbin/nologin",
        create_home=False,
    )
    env = {
        # Tells a stuck worker in two minutes; the default of 300 s leaves clients hanging. The engine then exits and restarts.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "120",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **settings.serve_env,
    }
    files.template(
        name="Flags", src=str(TEMPLATES / "vllm.yaml.j2"), dest="/etc/qwen-serve/vllm.yaml", mode="644",
        model=CURRENT, served_model_name=settings.served_model_name, port=settings.serve_port, flags=dict(settings.serve_flags),
    )  # fmt: skip
    files.template(name="Environment", src=str(TEMPLATES / "env.j2"), dest="/etc/qwen-serve/env", mode="644", env=env)
    files.template(
        name="Unit", src=str(TEMPLATES / "qwen-serve.service.j2"), dest=f"/etc/systemd/system/{UNIT}", mode="644",
        run_as=USER, engine=f"{ENGINES}/current", python=PYTHON, port=settings.serve_port,
        served_model_name=settings.served_model_name, start_deadline_s=settings.serve_start_deadline_s,
        judge_text=settings.serve_judge_text,
    )  # fmt: skip
    url = f"http://127.0.0.1:{settings.serve_port}"
    run_unit(
        name="qwen-serve runs, and a completion comes back",
        unit=UNIT,
        config=[f"/etc/systemd/system/{UNIT}", "/etc/qwen-serve/vllm.yaml", "/etc/qwen-serve/env", f"{ENGINES}/current", CURRENT],
        test=completion_test(PYTHON, url, settings.served_model_name, judge_text=settings.serve_judge_text),
        test_deadline_s=60,
        _timeout=settings.serve_start_deadline_s + 120,
    )
