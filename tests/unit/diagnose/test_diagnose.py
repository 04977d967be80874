"""Every signature is named, whatever a log went through: colours, Docker, journald, wrapping, several processes, a cut end."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.failures import Failure, failures
from laoka.catalog.xids import xids
from laoka.cli.main import cli
from laoka.diagnose import scan as scanning
from laoka.diagnose.chain import Diagnosis, diagnose
from laoka.diagnose.lines import clean
from laoka.diagnose.scan import Scan, scan

DATA = Path(__file__).parents[2] / "data"
START = (DATA / "serving" / "vllm-0.32.0-startup-eager.log").read_bytes().decode()  # progress bars and all
ROWS = {row.id: row for row in failures()}
# engines.md and the public threads of each: the fragment as the engine, torch or the kernel prints it, in a whole line.
LINES: dict[str, str] = {
    "ct-scheme-min-75": "RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU. Min capability: 75. ', "
    "'Current capability: 70.')",
    "quant-min-capability": "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. "
    "Minimum capability: 75. Current capability: 70.",
    "no-kernel-image": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "bf16-needs-80": "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. "
    "Your Tesla V100-SXM2-32GB GPU has compute capability 7.0.",
    "fa2-needs-80": "RuntimeError: FA2 is only supported on devices with compute capability >= 8",
    "fa-version-assert": "AssertionError: is_fa_version_supported(fa_version)",
    "fp8e4nv-triton": "ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e5',)",
    "shared-memory-96k": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 102400, "
    "Hardware limit: 98304. Reducing block sizes or `num_stages` may help.",
    "shared-memory-exceeds": "RuntimeError: Shared memory exceeds 96KB: 99840 bytes",
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 15.77 GiB",
    "oom-text": "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "qpn-prepack-oom": "in _qpn_prepack: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 60.00 MiB",
    "no-kv-blocks": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    "max-len-too-long": "ValueError: To serve at least one request with the models's max seq len (262144), (8.0 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (1.48 GiB).",
    "free-memory-less": "ValueError: Free memory on device (3.1/31.74 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 28.57 GiB).",
    "mamba-blocks": "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (54).",
    "align-block": "AssertionError: In Mamba cache align mode, block_size (2048) must be <= max_num_batched_tokens (1024).",
    "scheduled-tokens": "ValueError: max_num_scheduled_tokens is set to -8 based on the speculative decoding settings, which does "
    "not allow any tokens to be scheduled.",
    "flash-v100-import": "ModuleNotFoundError: No module named 'flash_attn_v100_cuda'",
    "tilelang-bf16": 'error: no suitable user-defined conversion from "__nv_bfloat16" to "__half" exists',
    "flashqla-jit": "FileNotFoundError: flash_qla_sm70_gdn_strided.so: cannot open shared object file, and nvcc was not found",
    "tilelang-target": "ValueError: No CUDA or HIP or MPS available on this system.",
    "gcc-too-new": "#error -- unsupported GNU version! gcc versions later than 14 are not supported!",
    "no-c-compiler": "RuntimeError: Failed to find C compiler. Please specify via CC environment variable",
    "no-python-h": "fatal error: Python.h: No such file or directory",
    "mtp-draft-probs": "RuntimeError: Missing cached draft probabilities for request cmpl-1",
    "graphs-stuck": "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/3 [00:00<?, ?it/s]",
    "custom-all-reduce": "RuntimeError: Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'",
    "libcuda-segfault": "python3[2211]: segfault at 8 ip 00007f3a8c2b1a4e sp 00007ffd error 4 in libcuda.so.580.173.02[7f3a8c]",
    "nccl-timeout": "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL",
    "nccl-init-hang": "x99:2211:2211 [0] NCCL INFO ncclCommInitRank comm 0x55d rank 0 nranks 2 cudaDev 0 - Init START",
    "driver-too-old": "RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please update",
    "error-802": "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "error-804": "RuntimeError: Error 804: forward compatibility was attempted on non supported HW",
    "glibc-2.38": "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by /x/_C.abi3.so)",
    "undefined-symbol": "ImportError: /x/vllm/_C.abi3.so: undefined symbol: _ZN3c106detail14torchCheckFailEPKcS2_j",
    "exclamation-marks": "the answer was '!!!!!!!!!!!!!!!!'",
    "candidate-selector": "ValueError: There is no module or parameter named 'candidate_selector' in DFlash2DraftModel",
    "drafter-lm-head": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x5120 and 2560x248320)",
    "runner-v2": "NotImplementedError: Model Runner V2 does not yet support: mamba_cache_mode",
    "qwen3-5-unknown": "ValueError: The checkpoint you are trying to load has model type `qwen3_5` but Transformers does not "
    "recognize this architecture.",
    "triton-exp": "AttributeError: module 'triton.language' has no attribute 'exp'",
    "illegal-access": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "externally-managed": "error: externally-managed-environment",
    "libcudart-12": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "engine-core-died": "vllm.v1.engine.exceptions.EngineDeadError: EngineCore died unexpectedly",
    "below-sm70": "RuntimeError: GPUs with compute capability below 7.0 are not supported.",
    "port-taken": "OSError: [Errno 98] Address already in use",
    "bad-flag": "vllm serve: error: unrecognized arguments: --swap-space 4",
    "context-too-long": "ValueError: User-specified max_model_len (9) is greater than the derived max_model_len (8)",
    "model-missing": "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/srv/none'.",
    "cpu-init-missing": "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'",
    "disk-full": "OSError: [Errno 28] No space left on device: '/var/cache/qwen-serve'",
    "host-oom-killer": "kernel: Out of memory: Killed process 2727 (VLLM::EngineCor) total-vm:91231232kB",
    "no-cuda-device": "RuntimeError: No CUDA GPUs are available",
    "ecc-uncorrectable": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "launch-failure": "RuntimeError: CUDA error: unspecified launch failure",
    "fell-off-bus": "NVRM: GPU 0000:03:00.0: GPU has fallen off the bus.",
    "gpu-lost": "Unable to determine the device handle for GPU0000:03:00.0: GPU is lost.  Reboot the system to recover this GPU",
    "rm-init-failed": "NVRM: GPU 0000:03:00.0: RmInitAdapter failed! (0x24:0x65:1436)",
    "bar1-0m": "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:03:00.0)",
    "bar-no-space": "pci 0000:03:00.0: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space",
    "driver-mismatch": "Failed to initialize NVML: Driver/library version mismatch",
    "driver-ignores-card": "NVRM: The NVIDIA Tesla V100-PCIE-16GB GPU installed in this system is supported through the NVIDIA "
    "580.xx Legacy drivers. The 595.45.04 NVIDIA driver will ignore this GPU.",
    "open-module": "NVRM: The NVIDIA GPU 0000:03:00.0 installed in this system is not supported by open nvidia.ko because",
    "no-power-cable": "NVRM: GPU 0000:03:00.0 does not have the necessary power cables connected.",
    "smi-no-driver": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "aer-fatal": "pcieport 0000:00:03.0: PCIe Bus Error: severity=Fatal, type=Transaction Layer, (Requester ID)",
    "dkms-failed": "Error! Bad return status for module build on kernel: 6.14.0-37-generic (x86_64)",
    "unsigned-module": "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service",
    "nvswitch-link": "NVRM: Xid (PCI:0000:03:00): 74, NVLink: fatal error detected on link 2(0x10000, 0x0, 0x0, 0x0)",
    "fa2-info": "Cannot use FlashAttention-2 backend for Volta and Turing GPUs.",
    "no-p2p-info": "Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.",
}
TWICE = "wrapped, then docker compose"
BENIGN = {row.id for row in failures() if row.benign}
SERIOUS = sorted(set(LINES) - BENIGN)


def diagnosed(text: str | bytes, name: str = "vllm.log") -> Diagnosis:
    return diagnose([scanned(text, name)])


def scanned(text: str | bytes, name: str = "vllm.log") -> Scan:
    return scan(io.BytesIO(text.encode() if isinstance(text, str) else text), name)


def errors(line: str) -> str:
    return f"(EngineCore pid=2727) ERROR 12-01 03:54:15 [core.py:980] {line}"


# What logs go through before somebody sees them.
MANGLED: dict[str, Callable[[str], str]] = {
    "as it is": lambda line: line,
    "of a process of vLLM": errors,
    "coloured": lambda line: f"\x1b[0;36m(EngineCore pid=2727)\x1b[0;0m \x1b[31mERROR\x1b[0m 12-01 03:54:15 [core.py:980] {line}",
    "coloured within": lambda line: f"\x1b[1;31m{line[:9]}\x1b[0m\x1b[1m{line[9:]}\x1b[0m",
    "docker compose": lambda line: f"vllm-1  | {errors(line)}",
    "docker timestamps": lambda line: f"2026-12-01T03:54:15.123456789Z {errors(line)}",
    "docker json": lambda line: json.dumps({"log": errors(line) + "\n", "stream": "stderr", "time": "2026-12-01T03:54:15.1Z"}),
    "kubernetes": lambda line: f"2026-12-01T03:54:15.123456789Z stderr F {errors(line)}",
    "journald": lambda line: f"Dec 01 03:54:15 x99 qwen-serve[783]: {errors(line)}",
    "journald iso": lambda line: f"2026-12-01T03:54:15+0000 x99 qwen-serve[783]: {errors(line)}",
    "journald json": lambda line: json.dumps({"MESSAGE": errors(line), "PRIORITY": "6"}),
    "wrapped at 40": lambda line: "\n".join(textwrap.wrap(line, 40, break_long_words=True, drop_whitespace=False)),
    "wrapped within words": lambda line: "\n".join(line[at : at + 33] for at in range(0, len(line), 33)),
    TWICE: lambda line: "\n".join(f"vllm-1  | {line[at : at + 47]}" for at in range(0, len(line), 47)),
    "Windows line ends": lambda line: line + "\r",
}


# The 46 that were collected from public reports, by their number there: the fragment alone, as it was reported.
FRAGMENTS = {
    1: ("Quantization scheme is not supported for ', 'the current GPU. Min capability: 75", "ct-scheme-min-75"),
    2: ("is not supported for the current GPU. Minimum capability:", "quant-min-capability"),
    3: ("no kernel image is available for execution on the device", "no-kernel-image"),
    4: ("Bfloat16 is only supported on GPUs with compute capability of at least 8.0", "bf16-needs-80"),
    5: ("FA2 is only supported on devices with compute capability >= 8", "fa2-needs-80"),
    6: ("Cannot use FlashAttention-2 backend for Volta and Turing GPUs.", "fa2-info"),
    7: ('File "vllm/attention/fa.py", line 9, in is_fa_version_supported\n    assert ok\nAssertionError', "fa-version-assert"),
    8: ("type fp8e4nv not supported in this architecture", "fp8e4nv-triton"),
    9: ("out of resource: shared memory, Required: 102400, Hardware limit: 98304", "shared-memory-96k"),
    10: ("Shared memory exceeds 96KB: 99840 bytes", "shared-memory-exceeds"),
    11: ("torch.OutOfMemoryError: CUDA out of memory.", "oom"),
    12: ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "oom"),
    13: ('in _qpn_prepack\n    out = pack(weight)\ntorch.OutOfMemoryError: CUDA out of memory.', "qpn-prepack-oom"),
    14: ("No available memory for the cache blocks", "no-kv-blocks"),
    15: ("To serve at least one request with the models's max seq len", "max-len-too-long"),
    16: ("Free memory on device (3.1/31.74 GiB) on startup is less than desired GPU memory utilization", "free-memory-less"),
    17: ("max_num_seqs (256) exceeds available Mamba cache blocks", "mamba-blocks"),
    18: ("In Mamba cache align mode, block_size (", "align-block"),
    19: ("max_num_scheduled_tokens is set to", "scheduled-tokens"),
    20: ("No module named 'flash_attn_v100_cuda'", "flash-v100-import"),
    21: ('no suitable user-defined conversion from "__nv_bfloat16" to "__half"', "tilelang-bf16"),
    22: ("FlashQLA JIT: missing flash_qla_sm70_gdn_strided.so, nvcc not found", "flashqla-jit"),
    23: ("No CUDA or HIP or MPS", "tilelang-target"),
    24: ("unsupported GNU version! gcc versions later than", "gcc-too-new"),
    25: ("Failed to find C compiler", "no-c-compiler"),
    26: ("Python.h: No such file or directory", "no-python-h"),
    27: ("Missing cached draft probabilities for request", "mtp-draft-probs"),
    28: ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 0/3", "graphs-stuck"),
    29: ("custom_all_reduce.cuh:455 failed", "custom-all-reduce"),
    30: ("python3[1]: segfault at 8 ip 00007f in libcuda.so.580.173.02", "libcuda-segfault"),
    31: ("Custom allreduce is disabled because your platform lacks GPU P2P capability", "no-p2p-info"),
    32: ("NCCL INFO comm 0x1 rank 0 nranks 2 - Init START", "nccl-init-hang"),
    33: ("The NVIDIA driver on your system is too old (found version 12080)", "driver-too-old"),
    34: ("Error 802: system not yet initialized", "error-802"),
    35: ("Error 804: forward compatibility was attempted on non supported HW", "error-804"),
    36: ("version 'GLIBC_2.38' not found", "glibc-2.38"),
    37: ("undefined symbol: _ZN3c10 in flash_attn_v100_cuda.cpython-312-x86_64-linux-gnu.so", "undefined-symbol"),
    38: ("output !!!!!!", "exclamation-marks"),
    39: ("no module named candidate_selector", "candidate-selector"),
    40: ("mat1 and mat2 shapes cannot be multiplied", "drafter-lm-head"),
    41: ("method='dflash' is implemented only by Model Runner V2", "runner-v2"),
    42: ("model type `qwen3_5` but Transformers does not recognize this architecture", "qwen3-5-unknown"),
    43: ("module 'triton.language' has no attribute 'exp'", "triton-exp"),
    44: ("an illegal memory access was encountered", "illegal-access"),
    45: ("error: externally-managed-environment", "externally-managed"),
    46: ("libcudart.so.12: cannot open shared object file", "libcudart-12"),
}  # fmt: skip


@pytest.mark.parametrize("number", FRAGMENTS)
def test_each_reported_fragment_is_named(number: int) -> None:
    fragment, row_id = FRAGMENTS[number]
    prefixed = "\n".join(errors(line) for line in fragment.split("\n"))
    for log in (f"{fragment}\n", f"{START}{prefixed}\n"):
        found = diagnosed(log)
        named = [*([found.root.id] if found.root else []), *(item.id for item in found.also)]
        assert row_id in named and (ROWS[row_id].benign or named[0] == row_id)
    assert len(FRAGMENTS) == 46


def test_every_row_has_a_line_here() -> None:
    assert set(LINES) == set(ROWS)
    assert len([row for row in failures() if row.seen != "v100" or "1Cat" in row.source]) >= 46


# Wrapped and prefixed line by line, only what tells of an error says where to look twice.
CASES = [(row_id, how) for row_id in SERIOUS for how in MANGLED if how != TWICE or clean(LINES[row_id]).is_error]


def test_most_lines_tell_of_an_error() -> None:
    assert len([case for case in CASES if case[1] == TWICE]) > 45 and len(CASES) > 900


@pytest.mark.parametrize(("row_id", "how"), CASES)
def test_a_signature_is_named_whatever_the_log_went_through(row_id: str, how: str) -> None:
    mangled = MANGLED[how](LINES[row_id])
    found = diagnosed(f"{START}{mangled}\n")
    assert found.root is not None, "nothing was found"
    accepted = {row_id, "xid-74"} if row_id == "nvswitch-link" else {row_id}
    assert found.root.id in accepted
    first, last = 101, 100 + len(mangled.splitlines())
    assert found.root.line_number is not None and first <= found.root.line_number <= last
    assert found.root.evidence and "\n" not in found.root.evidence and "\x1b" not in found.root.evidence
    assert all(all(words) for words in found.root.words.values())


@pytest.mark.parametrize("row_id", sorted(BENIGN))
def test_information_is_no_finding(row_id: str) -> None:
    found = diagnosed(f"{START}(EngineCore pid=1) WARNING 12-01 03:54:15 [x.py:1] {LINES[row_id]}\n")
    assert found.root is None and not found.anything and [item.id for item in found.also] == [row_id]


@pytest.mark.parametrize("row", [row for row in failures() if row.forms], ids=lambda row: row.id)
def test_other_wordings_count_too(row: Failure) -> None:
    for form in row.forms:
        found = diagnosed(f"{START}RuntimeError: {' ... '.join(form)}\n")
        assert found.root is not None and found.root.id == row.id, form


@pytest.mark.parametrize("row", xids(), ids=lambda row: row.id)
def test_every_xid_of_the_catalogue_is_named(row: Any) -> None:
    found = diagnosed(f"[12345.678] NVRM: Xid (PCI:0000:03:00): {row.number}, pid=2727, name=python, some words\n")
    assert found.root is not None and found.root.id == row.id
    assert row.name in found.root.words["en"][0] and row.name_zh in found.root.words["zh"][0]


def test_the_earliest_oom_is_the_root_above_a_chain_of_key_errors() -> None:
    noise = [errors("KeyError: 'req-%d'" % number) for number in range(30)]  # noqa: UP031
    log = [
        *START.rstrip("\n").split("\n"),
        "(Worker_TP1 pid=3001) ERROR 12-01 03:54:15 [multiproc_executor.py:700] Traceback (most recent call last):",
        "(Worker_TP0 pid=3000) INFO 12-01 03:54:15 [x.py:1] something of another process",
        f"(Worker_TP1 pid=3001) ERROR 12-01 03:54:15 [multiproc_executor.py:700] {LINES['oom']}",
        *noise,
        f"(Worker_TP0 pid=3000) ERROR 12-01 03:54:16 [multiproc_executor.py:700] {LINES['oom']}",
        f"(APIServer pid=783) ERROR 12-01 03:54:17 [async_llm.py:1] {LINES['engine-core-died']}",
    ]
    found = diagnosed("\n".join(log))
    assert found.root is not None and (found.root.id, found.root.line_number, found.root.count) == ("oom", 103, 2)
    assert found.root.process == "Worker_TP1 3001" and [item.id for item in found.also] == ["engine-core-died"]
    assert found.first_error is not None and found.first_error.line_number == 103
    assert found.walked[3].found == ("oom",) and "no_oom" not in found.walked[3].ruled_out


def test_a_lost_card_stands_above_what_the_engine_says_of_it() -> None:
    log = [
        f"2026-12-01T03:54:15+0000 x99 qwen-serve[783]: {errors(LINES['launch-failure'])}",
        f"2026-12-01T03:54:15+0000 x99 qwen-serve[783]: {errors(LINES['illegal-access'])}",
        "2026-12-01T03:54:16+0000 x99 kernel: NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', name=<unknown>, "
        "GPU has fallen off the bus.",
        "2026-12-01T03:54:16+0000 x99 kernel: NVRM: Xid (PCI:0000:03:00): 154, GPU recovery action changed",
    ]
    found = diagnosed("\n".join(log))
    assert found.root is not None and found.root.id == "xid-79" and found.root.line_number == 3
    assert {"illegal-access", "launch-failure", "xid-154"} <= {item.id for item in found.also}


def test_what_a_good_start_healed_is_not_the_root() -> None:
    log = f"{errors(LINES['bf16-needs-80'])}\n{START}{errors(LINES['no-kv-blocks'])}\n"
    found = diagnosed(log)
    assert found.root is not None and found.root.id == "no-kv-blocks" and [item.id for item in found.also] == ["bf16-needs-80"]
    # A start that only followed the failure heals it in the log, not in fact: nothing else is there to name.
    assert (diagnosed(f"{errors(LINES['oom'])}\n{START}").root or pytest.fail()).id == "oom"


def test_a_capture_of_graphs_that_went_on_was_not_stuck() -> None:
    stuck = diagnosed(f"{LINES['graphs-stuck']}\n")
    assert stuck.root is not None and stuck.root.id == "graphs-stuck"
    assert diagnosed(f"{LINES['graphs-stuck']}\nINFO 12-01 03:54:15 [x.py:1] Graph capturing finished in 3 secs\n").root is None


def test_an_unknown_failure_points_to_its_first_error_line() -> None:
    log = [
        *START.rstrip("\n").split("\n"),
        "(EngineCore pid=1) ERROR 12-01 03:54:15 [core.py:980] Traceback (most recent call last):",
        '(EngineCore pid=1) ERROR 12-01 03:54:15 [core.py:980]   File "x.py", line 1, in <module>',
        "(EngineCore pid=1) ERROR 12-01 03:54:15 [core.py:980] ZorkError: the frobnicator is not aligned",
        "(APIServer pid=2) RuntimeError: later words",
    ]
    found = diagnosed("\n".join(log))
    assert found.root is None and found.anything and found.first_error is not None
    assert (found.first_error.line_number, found.first_error.text) == (103, "ZorkError: the frobnicator is not aligned")


def test_normal_logs_have_nothing() -> None:
    found = diagnosed(START)
    assert not found.anything and not found.also and scanned(START).lines == 100 and scanned(START).starts == 1
    assert scanned("").lines == 0 and diagnosed("").walked[0].ruled_out == ("empty_log",)


@pytest.mark.parametrize("cut", [1, 40, 95])
def test_a_file_cut_at_its_end_is_read_to_there(cut: int) -> None:
    whole = f"{START}{errors(LINES['no-kernel-image'])}"
    assert (diagnosed(whole).root or pytest.fail()).id == "no-kernel-image"
    diagnosed(whole[:-cut])
    assert (diagnosed(whole.encode()[: -len(START) // 2] + b"\xff\xfe\x00" + whole.encode()).root or pytest.fail()).line_number


def test_across_the_borders_of_chunks_the_line_numbers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(scanning, "TAIL_BYTES", 700)
    filler = "INFO 12-01 03:54:15 [loggers.py:257] Engine 000: running\n"
    for lines in range(1, 60, 7):
        found = diagnosed(filler * lines + errors(LINES["oom"]) + "\n" + filler * 50)
        assert found.root is not None and (found.root.line_number, found.root.count) == (lines + 1, 1)
        assert found.scans[0].lines == lines + 51


def test_one_endless_line() -> None:
    found = diagnosed("x" * 9_000_000 + " RuntimeError: " + LINES["no-kernel-image"] + "y" * 5_000_000)
    assert found.root is not None and found.root.id == "no-kernel-image" and found.root.line_number == 1
    assert len(found.root.evidence) <= 500


@given(st.binary(max_size=3000))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    found = diagnosed(data)
    assert found.scans[0].size_bytes == len(data)
    json.dumps(found.table("zh"))


@given(st.text(max_size=300))
def test_no_line_makes_it_fail(text: str) -> None:
    assert isinstance(clean(text).is_error, bool)


def run(*words: str, stdin: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["diagnose", *words], input=stdin, standalone_mode=False)
    return (done.return_value if done.exception is None else 2), done.output


def test_the_interface_for_scripts(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(f"{START}{errors(LINES['bf16-needs-80'])}\n{errors(LINES['engine-core-died'])}\n")
    status, output = run(str(log), "--json")
    document = json.loads(output)
    root = document["root_cause"]
    assert status == 1 and {"id", "title", "line_number", "evidence", "cause", "fix", "step"} <= set(root)
    assert (root["id"], root["line_number"], root["step"]) == ("bf16-needs-80", 101, "parameters")
    assert "half" in root["fix"] and root["evidence"] == LINES["bf16-needs-80"]
    assert [item["id"] for item in document["also"]] == ["engine-core-died"]
    assert document["first_error_line"]["line_number"] == 101
    assert [step["step"] for step in document["steps"]] == ["symptom", "input", "environment", "parameters", "tool"]


def test_a_rotated_log_is_unpacked_as_it_is_read(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log.1.gz"
    log.write_bytes(gzip.compress((START + errors(LINES["oom"])).encode()))
    assert json.loads(run(str(log), "--json")[1])["root_cause"]["line_number"] == 101
    log.write_bytes(gzip.compress(START.encode() * 50)[:-40])
    assert "cut off" in refused(str(log))


def refused(*words: str) -> str:
    """Why logs could not be read."""
    done = CliRunner().invoke(cli, ["diagnose", *words], standalone_mode=False)
    assert isinstance(done.exception, click.ClickException), done.output
    return done.exception.message


def test_a_packed_log_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log.1.gz"
    rest = "".join(f"INFO {number * 7919 % 100003} tokens\n" for number in range(20000))
    whole = gzip.compress((START + errors(LINES["oom"]) + rest).encode())
    for cut in (len(whole) - 1, len(whole) - 9, len(whole) // 2):
        log.write_bytes(whole[:cut])
        done = CliRunner().invoke(cli, ["diagnose", str(log), "--json"], standalone_mode=False)
        assert done.return_value == 1 and json.loads(done.stdout)["root_cause"]["line_number"] == 101
        assert "it was read as far as it goes" in done.stderr
    spoiled = bytearray(whole)
    spoiled[len(whole) // 2 : len(whole) // 2 + 200] = bytes(200)
    log.write_bytes(spoiled)
    assert run(str(log))[0] == 1
    for size in (2, 9, 12):
        log.write_bytes(whole[:size])
        assert str(log) in refused(str(log))


def test_a_packed_log_is_unpacked_from_a_pipe_too(tmp_path: Path) -> None:
    def piped(content: bytes) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["diagnose", "-", "--json"], input=content, standalone_mode=False)
        status = (
            done.return_value
            if isinstance(done.return_value, int)
            else 2
            if isinstance(done.exception, click.ClickException)
            else -1
        )
        return status, done.output if status != 2 else str(done.exception)

    status, output = piped(gzip.compress((START + errors(LINES["oom"])).encode()))
    assert status == 1 and json.loads(output)["root_cause"]["line_number"] == 101
    assert piped(gzip.compress(START.encode()))[0] == 0
    capture = io.BytesIO()
    with tarfile.open(fileobj=capture, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("report.txt"))
    assert piped(capture.getvalue())[0] == 2 and piped(gzip.compress(bytes(range(256)) * 40))[0] == 2 and piped(b"")[0] == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_log_that_powershell_wrote_is_read(tmp_path: Path, encoding: str, packed: bool) -> None:
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    content = (mark + (START + errors(LINES["oom"])).replace("\n", "\r\n")).encode(encoding)
    log = tmp_path / "vllm.log"
    log.write_bytes(gzip.compress(content) if packed else content)
    status, output = run(str(log), "--json")
    assert status == 1 and json.loads(output)["root_cause"]["line_number"] == 101
    assert json.loads(output)["root_cause"]["evidence"] == LINES["oom"]


def test_exit_statuses_and_both_languages(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(START)
    assert run(str(log))[0] == 0 and json.loads(run(str(log), "--json")[1])["root_cause"] is None
    log.write_text(START + "ZorkError: new\n")
    status, output = run(str(log), "--json")
    assert status == 1 and json.loads(output)["root_cause"] is None
    assert json.loads(output)["first_error_line"] == {"line_number": 101, "text": "ZorkError: new", "source": str(log)}
    assert run(str(tmp_path / "none.log"))[0] == 2
    log.write_text(errors(LINES["oom"]))
    done = CliRunner().invoke(cli, ["--lang", "zh", "diagnose", str(log)], standalone_mode=False)
    assert "根本原因" in done.output and "显存不足" in done.output and "laoka plan" in done.output
    assert "ROOT CAUSE: Out of GPU memory [oom]" in run(str(log))[1]


def test_a_captured_host_and_a_log_together(tmp_path: Path) -> None:
    capture = DATA / "hosts" / "h200_driver_580_ubuntu_2404.probe.txt"
    status, output = run(str(capture), "--json")
    assert status in (0, 1) and json.loads(output)["read"] == []
    log = tmp_path / "vllm.log"
    log.write_text(errors(LINES["no-kv-blocks"]))
    document = json.loads(run(str(log), str(capture), "--json")[1])
    assert document["root_cause"]["id"] == "no-kv-blocks"
    assert not any("was not looked at" in words for step in document["steps"] for words in step["ruled_out"])


# What a real machine's own words are called, by the captures' names (the root is the agent's, where it judges the same capture).
CAPTURES = {
    "dmesg_580_legacy_p100_tesla.txt": "driver-ignores-card",
    "dmesg_aer_fatal_then_xid79_bdw_ep.txt": "xid-79",
    "dmesg_all_bars_0m.txt": "bar1-0m",
    "dmesg_bar1_0m_legacy_format.txt": "bar1-0m",
    "dmesg_fallen_off_2012_format.txt": "fell-off-bus",
    "dmesg_fallen_off_multiline_no_xid.txt": "fell-off-bus",
    "dmesg_m40_z77_bridge_window_no_space.txt": "bar-no-space",
    "dmesg_m40_z77_working_32g.txt": None,
    "dmesg_pcie_bandwidth_limited.txt": None,
    "dmesg_xid109_ctxsw.txt": "xid-109",
    "dmesg_xid31_oldest_format.txt": "xid-31",
    "dmesg_xid74_nvlink_fatal.txt": "xid-74",
    "dmesg_xid79_fallen_off_pid_unknown.txt": "xid-79",
    "dmesg_xid94_95_source_format.txt": "xid-94",
    "dkms_build_fail_470_kernel_6_14.txt": "dkms-failed",
    "smi_api_mismatch_ubuntu_unattended.txt": "driver-mismatch",
    "smi_unable_handle_variants.txt": "gpu-lost",
}


@pytest.mark.parametrize("name", CAPTURES)
def test_real_machines_words(name: str) -> None:
    found = diagnosed((DATA / "captures" / name).read_bytes())
    assert (found.root.id if found.root else None) == CAPTURES[name]


def test_what_is_no_log_could_not_be_read(tmp_path: Path) -> None:
    rows = {"empty": (b"", "it is empty"), "binary": (random.Random(1).randbytes(20_000), "not a text log")}
    for name, (content, says) in rows.items():
        (tmp_path / name).write_bytes(content)
        done = CliRunner().invoke(cli, ["--lang", "en", "diagnose", str(tmp_path / name)])
        assert done.exit_code != 0 and says in done.output, done.output
    cut = b"INFO 12-01 10:00:00 started\n" * 20 + b"\0" * 20 + "\x1b[31m错误\x1b[0m\n".encode() * 20
    (tmp_path / "cut.log").write_bytes(cut)
    assert "not a text log" not in CliRunner().invoke(cli, ["diagnose", str(tmp_path / "cut.log")]).output
