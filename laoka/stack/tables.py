"""A stack, a refusal and a memory plan as plain tables: for the lock file and for --json. Pure."""

from __future__ import annotations

from typing import Any

from laoka.catalog.messages import Language
from laoka.stack.plan import MemoryPlan
from laoka.stack.resolve import Refusal, Stack


def stack_table(stack: Stack) -> dict[str, Any]:
    """Everything that a stack pins, without what is unknown."""
    return {key: value for key, value in stack_items(stack).items() if value is not None}


def stack_items(stack: Stack) -> dict[str, Any]:
    """Every key of a locked stack, None for what is unknown. What each is stands in the messages `lock.KEY`."""
    engine, drafter = stack.engine, stack.drafter
    return {
        "gpu": stack.gpu,
        "gpu_count": stack.gpu_count,
        "tensor_parallel": stack.tensor_parallel,
        "os_release": stack.os_release,
        "driver_branch": stack.driver_branch,
        "driver_version": stack.driver_version,
        "module_flavour": stack.module_flavour,
        "driver_source": stack.driver_source,
        "driver_packages": list(stack.driver_packages),
        "kernel_series": stack.kernel_series,
        "cuda_toolkit": stack.cuda_toolkit,
        "engine": engine.name,
        "engine_version": engine.version,
        "engine_listed": stack.engine_listed,
        "engine_package": engine.package,
        "wheel_file": engine.wheel_file,
        "wheel_url": engine.wheel_url,
        "wheel_bytes": engine.wheel_bytes,
        "sums_url": engine.sums_url,
        "glibc_min": engine.glibc_min,
        "engine_device": engine.device,
        "engine_speculation": engine.speculation,
        "wheel_sha256": stack.wheel_sha256,
        "python": stack.python,
        "python_source": stack.python_source,
        "torch": engine.torch,
        "torch_backend": engine.torch_backend,
        "pins": list(engine.pins),
        "remove_after_install": list(engine.remove_after_install),
        "dist_info_alias": engine.dist_info_alias,
        "attention_backend": engine.attention_backend,
        "quantisation": stack.quantisation,
        "model": stack.model_name,
        "model_repo": stack.model_repo,
        "model_revision": stack.model_revision,
        "speculative": stack.speculative,
        "speculative_method": stack.speculative_method,
        "speculative_tokens": stack.speculative_tokens,
        "speculative_reason": stack.speculative_reason.say(),
        "speculative_fallback": stack.speculative_fallback,
        "drafter_repo": drafter.repo if drafter else None,
        "drafter_revision": drafter.revision if drafter else None,
        "drafter_sha256": drafter.weights_sha256 if drafter else None,
        "kv_cache_dtype": stack.kv_cache_dtype,
        "serve_flags": dict(stack.serve_flags),
        "serve_env": dict(stack.serve_env),
    }


def memory_table(memory: MemoryPlan) -> dict[str, Any]:
    """A memory plan; `per_gpu` is bytes by line, `lines` the arithmetic and source of each."""
    return {
        "fits": memory.fits,
        "per_gpu": {line.key: line.bytes for line in memory.lines},
        "lines": [
            {
                "item": line.key,
                "bytes": line.bytes,
                "in_utilization": line.inside,
                "arithmetic": line.arithmetic,
                "source": line.source,
            }
            for line in memory.lines
        ],
        "total_bytes": memory.total_bytes,
        "gpu_memory_bytes": memory.memory_bytes,
        "pool_bytes": memory.pool_bytes,
        "tensor_parallel": memory.tensor_parallel,
        "max_context": memory.max_context,
        "max_streams": memory.max_streams,
        "gpu_memory_utilization": memory.utilization,
        "max_model_len": memory.load.context_tokens,
        "max_num_seqs": memory.load.streams,
        "max_num_batched_tokens": memory.load.batched_tokens,
    }


def outcome_table(outcome: Stack | Refusal, lang: Language = "en") -> dict[str, Any]:
    """What `laoka plan --json` prints: `stack` or `refusal`, and `memory`, None where no plan could be made."""
    if isinstance(outcome, Refusal):
        return {
            "refusal": [
                {"constraint": item.constraint, "evidence": item.evidence.say(lang), "way_out": item.way_out.say(lang)}
                for item in outcome.violations
            ],
            "memory": memory_table(outcome.memory) if outcome.memory else None,
        }
    expected = [
        {
            "engine": profile.engine,
            "gpu": profile.gpu,
            "gpu_count": profile.count,
            "measured_by": profile.measured_by,
            "status": profile.status,
            "works": profile.works,
            "source": profile.source,
            "speed": [
                {
                    "kind": speed.kind,
                    "tok_s": speed.tok_s,
                    "context_tokens": speed.context_tokens,
                    "streams": speed.streams,
                    "condition": speed.condition,
                }
                for speed in profile.speed
            ],
        }
        for profile in outcome.profiles
    ]
    ceilings = outcome.ceilings
    return {
        "stack": stack_table(outcome),
        "warnings": [warning.say(lang) for warning in outcome.warnings],
        "memory": memory_table(outcome.memory),
        "expected": expected,
        "ceilings": None
        if ceilings is None
        else {
            "decode_tok_s": ceilings.decode_tok_s,
            "decode_speculative_tok_s": ceilings.decode_speculative_tok_s,
            "decode_at_published_acceptance_tok_s": ceilings.decode_at_published_acceptance_tok_s,
            "prefill_tok_s": ceilings.prefill_tok_s,
            "arithmetic": ceilings.arithmetic,
        },
    }
