"""The simulated Tesla V100 as a host sees it: sources of a stand-in libnvidia-ml.so.1, nvidia-smi,
nvidia-persistenced and kernel module.

Nothing here is NVIDIA software. laoka.sandbox.packages compiles and packs these files, laoka.sandbox.card writes the state
that they read.
"""

from __future__ import annotations

from pathlib import Path

SOURCES = Path(__file__).parent
NVML_SOURCE = SOURCES / "fakenvml.c"
PERSISTENCED_SOURCE = SOURCES / "persistenced.c"
SMI_SOURCE = SOURCES / "nvidia_smi.py"
MODULE_SOURCE = SOURCES / "nvidia_module.c"
MODULE_TOOL = SOURCES / "kernel_module.sh"
