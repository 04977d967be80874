"""Why a model server did not start, or ended: a name, one line of evidence, and what to do next. Pure.

The exact texts of vLLM stand here; what a V100 adds (memory, kernels, drivers) is in the catalogue of failure signatures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from laoka.catalog.failures import failures

KINDS = (
    "port_taken",
    "engine_missing",
    "bad_flag",
    "model_missing",
    "context_too_long",
    "start_failed",
    "start_too_slow",
    "engine_died",
    "server_killed",
    "supervisor_hung",
    "engine_frozen",
    "out_of_memory",
)

# Only these are final: a flag that the engine refuses stays refused, however often it is started.
FINAL_KINDS = frozenset({"bad_flag", "context_too_long"})
FINAL_STATUS, FAILED_STATUS = 2, 1
"""Exit status of the unit: 2 is not restarted (RestartPreventExitStatus=2), 1 is."""

# "(APIServer pid=783) ", "ERROR 12-01 03:54:15 [core.py:133] ": what vLLM puts before a line's own words.
_PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*(?:\([\w ]+ pid=\d+\)\s?)?(?:\x1b\[[0-9;]*m)*(?:(?:ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?"
)
_NO_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARNING) \d\d-\d\d ")
# The API server's own last words say only that its engine failed; the engine's, above them, say why.
_SECOND_HAND = ("Engine core initialization failed", "Engine process failed", "EngineCore encountered an issue")
_RAISED = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt))\b:? ?(.*)")


@dataclass(frozen=True)
class Failure:
    """What is wrong, by name; `detail` is the evidence in the engine's own words, `fix` the next thing to do."""

    kind: str
    detail: str
    fix: str = ""

    @property
    def status(self) -> int:
        """The exit status by which systemd decides whether to start it again."""
        return FINAL_STATUS if self.kind in FINAL_KINDS else FAILED_STATUS


def name_start_failure(status: int, tail: Sequence[str], unit: str) -> Failure:
    """Name a start that ended before the first completion.

    Arguments: `status` is the server's exit status (below zero: ended by that signal); `tail` its last lines of output.
    """
    lines = _own_words(tail)
    text = "\n".join(lines)
    detail = _last_error(lines) or f"exit status {status}; its last words: {_last_words(lines)}"
    if status == 2:
        said = next((line for line in reversed(lines) if "error: " in line), detail)
        return Failure("bad_flag", said, "correct serve_flags in the inventory: `vllm serve --help=all` on the host lists them")
    if "Address already in use" in text:
        return Failure("port_taken", detail, "see who has it: ss -ltnp")
    for found in failures():
        if not found.benign and found.role != "consequence" and found.id not in _NOT_BY_ROW and found.matches(text):
            kind = "out_of_memory" if "oom" in found.id or found.id == "no-kv-blocks" else "start_failed"
            return Failure(kind, f"{detail} ({found.id}: {found.cause})", found.fix)
    if "greater than the derived max_model_len" in text:
        line = next(line for line in lines if "greater than the derived max_model_len" in line)
        words = line.strip().removeprefix("Value error, ").split(" To allow overriding")[0]
        return Failure("context_too_long", words, "lower max-model-len in serve_flags: `laoka plan` says what fits")
    if (
        "Repo id must be in the form" in text
        or "does not appear to have a file named" in text
        or "No such file or directory" in detail
    ):
        return Failure("model_missing", detail, "pyinfra INVENTORY deploys/model.py")
    if "validation error for" in detail:
        where = next(index for index, line in enumerate(lines) if "validation error for" in line)
        said = " ".join(line.strip() for line in lines[where : where + 3])
        return Failure("bad_flag", said, "correct serve_flags in the inventory")
    if status < 0:
        return Failure("server_killed", f"ended by signal {-status} while it started", f"journalctl -u {unit} -k -n 50")
    return Failure("start_failed", detail, f"journalctl -u {unit} -n 100, or laoka diagnose on it")


# Rows of the catalogue that have a kind of their own here, and one that is words of an answer.
_NOT_BY_ROW = frozenset({"port-taken", "bad-flag", "context-too-long", "model-missing", "exclamation-marks"})


def _own_words(tail: Sequence[str]) -> list[str]:
    """Lines without what vLLM puts before them, and without those that tell of no error."""
    return [_PREFIX.sub("", line).rstrip() for line in tail if not _NO_ERROR.search(line)]


def _last_error(lines: Sequence[str]) -> str:
    """The last exception that was raised and is not about another one, as one line."""
    raised = [line for line in lines if _RAISED.match(line)]
    first_hand = [line for line in raised if not any(words in line for words in _SECOND_HAND)]
    return next((" ".join(line.split())[:300] for line in (*reversed(first_hand), *reversed(raised))), "")


def _last_words(lines: Sequence[str]) -> str:
    return next((" ".join(line.split())[:200] for line in reversed(lines) if line.strip()), "none")


def name_end(status: int, tail: Sequence[str], unit: str) -> Failure:
    """Name the end of a server that had been ready and was not asked to stop.

    vLLM's server exits with status 0 when its engine process dies (vLLM issue 48966), so 0 is no good end.
    """
    if status < 0:
        said = f"the API server was ended by signal {-status}"
        return Failure("server_killed", said, f"journalctl -u {unit} -n 100; journalctl -k says whether memory ran out")
    detail = next((line for line in reversed(_own_words(tail)) if _RAISED.match(line)), "")
    said = f"the server ended by itself with status {status}"
    meaning = ": its engine process died (vLLM issue 48966)" if status == 0 else ""
    return Failure(
        "engine_died", f"{said}{meaning}{'; last error: ' + detail[:200] if detail else ''}", f"journalctl -u {unit} -n 200"
    )
