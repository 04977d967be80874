"""A deploy for test_engine_and_models.py: the engine's flags as the serve role has them, for the plan that the host decided for."""

from pathlib import Path

from pyinfra.context import host

from laoka.facts.speculative import Decided
from laoka.operations.speculative import flags_file

flags_file(
    name="Flags",
    src=str(Path("templates/serve/vllm.yaml.j2").resolve()),
    dest="/tmp/flags.yaml",
    flags={"max-model-len": 4096},
    key=host.get_fact(Decided).key,
    expected={},
    values={"model": "/m", "served_model_name": "qwen", "port": 8000},
)
