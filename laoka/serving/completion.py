"""A real completion from a model server, judged: the only proof that it is healthy.

`/health`, `/v1/models` and `/metrics` all answer 200 while vLLM's engine process stands still, and the server's gauges then look
idle; only an answer that comes back within its deadline shows that it serves. The server is any that speaks OpenAI's API.

    python -m laoka.serving.completion ask  --url http://127.0.0.1:8000 --model NAME
    python -m laoka.serving.completion wait --url http://127.0.0.1:8000 --model NAME --deadline-s 900

Exit status: 0 healthy, 1 not healthy (the verdict's name is printed), 2 could not ask.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import requests

from laoka.files import write_atomic

Kind = Literal[
    "healthy",
    "port_closed",
    "unreachable",
    "not_ready",
    "engine_frozen",
    "timed_out",
    "refused",
    "server_error",
    "not_openai",
    "empty",
    "garbage",
    "repeating",
]

KEY_CREDENTIAL = "api-key"
QUESTION = "What is 2 + 3? Answer with the number only."
MAX_TOKENS = 16
MAX_ANSWER_BYTES = 1024 * 1024
HEALTH_DEADLINE_S = 2.0
ATTEMPT_DEADLINE_S = 120.0
"""What one attempt of `wait` may take: the first completion after a start compiles kernels."""
POLL_S = 1.0
PROGRESS_S = 5.0
LAST_ASK_S = 1.0
REFUSALS_TO_GIVE_UP = 5
SETTLED: tuple[Kind, ...] = ("refused", "not_openai", "garbage", "repeating", "empty")
"""What does not heal by waiting: a wrong model name or key, an answer that is noise; a few in a row rule out one that settles."""

# One character for the whole answer: what NaN logits decode to. Token 0 is "!" in Qwen's vocabulary, hence "!!!!".
# Four is the shortest answer that can't be a word or an ellipsis of three dots.
GARBAGE_SAME_MIN_CHARS = 4
# Broken UTF-8 and control characters: text of any language has none, a cut last character gives one.
GARBAGE_BROKEN_MIN_CHARS = 4
GARBAGE_BROKEN_SHARE = 0.3
# The last three quarters of the answer are one unit, four times over or more. Shorter than 24 characters it may be a real
# answer ("ha ha ha ha"); the canary's own answer has one.
REPEAT_MIN_CHARS = 24
REPEAT_MIN_TIMES = 4
REPEAT_TAIL_FROM = 0.25


@dataclass(frozen=True)
class Verdict:
    """What became of one question. `latency_s` is None when no answer came; `detail` is one line for people."""

    kind: Kind
    detail: str
    answer: str = ""
    latency_s: float | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    text_judged: bool = True

    @property
    def healthy(self) -> bool:
        """True when a real completion came back."""
        return self.kind == "healthy"


@dataclass(frozen=True)
class Server:
    """Where to ask and for what. `url` is the root, without /v1; `api_key` is sent as a bearer token and never printed."""

    url: str
    model: str
    api_key: str = ""
    judge_text: bool = True
    """False where the model is known to answer noise (random weights): then any answer of at least one token is one."""

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


def key_in(path: Path | None) -> str:
    """The API key in a file; empty for None. Errors: OSError, UnicodeDecodeError."""
    return path.read_text(encoding="utf-8").strip() if path else ""


def read_key(env: Mapping[str, str]) -> str:
    """The engine's API key from systemd's credentials (LoadCredential=); empty when the unit has none. Errors: as `key_in`."""
    folder = env.get("CREDENTIALS_DIRECTORY")
    path = Path(folder) / KEY_CREDENTIAL if folder else None
    return key_in(path if path and path.exists() else None)


# ---- judging: pure ------------------------------------------------------------------------------------------------------


def judge_text(answer: str) -> tuple[Kind, str]:
    """Whether a text looks like an answer: ("healthy", ""), or "empty", "garbage", "repeating" and why.

    The thresholds are the constants above; this finds broken engines, it does not grade answers.
    """
    dense = "".join(answer.split())
    if not dense:
        return "empty", "the answer has no text"
    broken = sum(char == "\ufffd" or unicodedata.category(char) in ("Cc", "Cn") for char in dense)
    if len(dense) >= GARBAGE_BROKEN_MIN_CHARS and broken / len(dense) >= GARBAGE_BROKEN_SHARE:
        return "garbage", f"{broken} of {len(dense)} characters are broken UTF-8 or control characters"
    if len(dense) >= GARBAGE_SAME_MIN_CHARS and len(set(dense)) == 1:
        return "garbage", f"the whole answer is the character {dense[0]!r}, {len(dense)} times"
    normal = " ".join(answer.split())
    tail = normal[int(len(normal) * REPEAT_TAIL_FROM) :]
    for text in (normal, tail):
        period = _period(text)
        if len(normal) >= REPEAT_MIN_CHARS and len(text) / period >= REPEAT_MIN_TIMES:
            return "repeating", f"the answer repeats {text[:period][:40]!r}"
    return "healthy", ""


def _period(text: str) -> int:
    """The shortest length after which a text repeats itself to its end (its own length when it does not)."""
    border = [0] * (len(text) + 1)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = border[length]
        if text[index] == text[length]:
            length += 1
        border[index + 1] = length
    return max(1, len(text) - border[len(text)])


def judge(status: int, body: str, latency_s: float, *, text_too: bool = True) -> Verdict:
    """Judge the HTTP answer to a chat completion.

    Arguments: `status` and `body` as received; `latency_s` from request to the last byte; `text_too` False leaves the words
    themselves unjudged (then an answer of no text is still one when the server counted tokens).
    """
    if status == 503:
        return Verdict("not_ready", f"HTTP 503: {_words(body)}", latency_s=latency_s)
    if 400 <= status < 500:
        return Verdict("refused", f"HTTP {status}: {_words(body)}", latency_s=latency_s)
    if status != 200:
        return Verdict("server_error", f"HTTP {status}: {_words(body)}", latency_s=latency_s)
    try:
        content = json.loads(body)
        choice = content["choices"][0]
        message = choice["message"]
        # A thinking model may spend all its tokens before the answer proper begins: thinking is a completion too.
        thinking = message.get("reasoning") or message.get("reasoning_content") or ""
        answer = str(message.get("content") or thinking)
        tokens = (content.get("usage") or {}).get("completion_tokens")
        finish = choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return Verdict("not_openai", f"HTTP 200, but not a chat completion: {_words(body)}", latency_s=latency_s)
    tokens = tokens if isinstance(tokens, int) else None
    finish = finish if isinstance(finish, str) else None
    kind, why = judge_text(answer)
    if finish in ("abort", "error"):
        kind, why = "server_error", f"the engine ended the answer with finish_reason {finish}"
    elif not text_too and kind != "healthy":
        kind, why = ("healthy", "") if answer or tokens else ("empty", "the answer has neither text nor tokens")
    detail = why or f"a completion came back in {latency_s:.2f} s"
    return Verdict(kind, detail, answer, latency_s, tokens, finish, text_too)


def _words(body: str) -> str:
    """What a server says about an error, in one short line: the message of its JSON, or its text without markup."""
    try:
        content: Any = json.loads(body)
        error = content.get("error", content)
        said = error.get("message") if isinstance(error, dict) else error
        said = said or content.get("message") or content.get("detail")
    except (ValueError, AttributeError, RecursionError):
        said = re.sub(r"<[^>]*>", " ", body)
    line = " ".join(str(said or "").split())
    return (line[:200] + "…" if len(line) > 200 else line) or "no words"


# ---- asking -------------------------------------------------------------------------------------------------------------


class _LateError(Exception):
    """An answer did not come within its deadline."""


R = TypeVar("R")


def _within(deadline_s: float, call: Callable[[], R]) -> R:
    """Run `call` for at most `deadline_s`. The time-outs of requests are for each read: a server that drips, or a name server
    that hangs, would outlast any of them. A call that is late goes on in its thread until its own time-outs end it.
    """
    result: list[R] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True, name="completion")
    thread.start()
    thread.join(max(0.0, deadline_s))
    if failure:
        raise failure[0]
    if not result:
        raise _LateError
    return result[0]


def _exchange(server: Server, method: str, path: str, deadline_s: float, content: object | None = None) -> tuple[int, str, float]:
    """One request: status, text (bounded) and seconds. Errors: _LateError, requests.RequestException."""

    def call() -> tuple[int, str, float]:
        started = time.monotonic()
        with requests.Session() as session:
            # The server is ours and near: a proxy of the environment would only be in the way, and netrc would send secrets.
            session.trust_env = False
            headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
            with session.request(
                method,
                server.root + path,
                json=content,
                headers=headers,
                timeout=max(0.1, deadline_s),
                stream=True,
                allow_redirects=False,
            ) as answer:
                data = b""
                for piece in answer.iter_content(65536):
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        break
                return answer.status_code, data[:MAX_ANSWER_BYTES].decode("utf-8", "replace"), time.monotonic() - started

    return _within(deadline_s, call)


def ask(server: Server, *, question: str = QUESTION, max_tokens: int = MAX_TOKENS, deadline_s: float = 30.0) -> Verdict:
    """Ask for one short chat completion and judge it; never takes longer than `deadline_s`, and never raises for a sick server.

    Errors: requests.exceptions.InvalidURL and the like (ValueError) for a URL that is none.
    """
    # What is kept back tells a frozen engine from a dead port when the completion does not come.
    reserve_s = min(HEALTH_DEADLINE_S, deadline_s / 5)
    content = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": False,
    }
    try:
        status, body, latency_s = _exchange(server, "POST", "/v1/chat/completions", deadline_s - reserve_s, content)
    except (_LateError, requests.Timeout):
        waited = f"no completion within {deadline_s - reserve_s:.0f} s"
        health, said = health_status(server, reserve_s)
        if health == 200:
            return Verdict("engine_frozen", f"{waited}, while /health answers 200")
        return Verdict("timed_out", f"{waited}, and /health says {said}")
    except requests.RequestException as error:
        return _no_connection(error)
    return judge(status, body, latency_s, text_too=server.judge_text)


def health_status(server: Server, deadline_s: float = HEALTH_DEADLINE_S) -> tuple[int | None, str]:
    """The status of /health (None: no answer), and the same in words."""
    try:
        status, _, _ = _exchange(server, "GET", "/health", deadline_s)
    except (_LateError, requests.Timeout):
        return None, f"nothing within {deadline_s:.0f} s"
    except requests.RequestException as error:
        return None, _no_connection(error).detail
    return status, f"HTTP {status}"


def metrics_text(server: Server, deadline_s: float) -> str:
    """What /metrics says (no key is needed for it); empty when it does not answer within `deadline_s`."""
    try:
        status, body, _ = _exchange(server, "GET", "/metrics", deadline_s)
    except (_LateError, requests.RequestException):
        return ""
    return body if status == 200 else ""


def _no_connection(error: requests.RequestException) -> Verdict:
    if isinstance(error, ValueError):
        raise error  # a URL that is none: the caller's mistake, not the server's state
    text = str(error)
    if "Connection refused" in text:
        return Verdict("port_closed", "connection refused: nothing listens there")
    if "RemoteDisconnected" in text or "Connection reset" in text or "IncompleteRead" in text or "Connection broken" in text:
        return Verdict("server_error", "the server closed the connection before it had answered")
    for words, meaning in _NETWORK_WORDS.items():
        if words in text:
            return Verdict("unreachable", meaning)
    return Verdict("unreachable", type(error).__name__)


_NETWORK_WORDS = {
    "Name or service not known": "the name is not known",
    "Temporary failure in name resolution": "the name server does not answer",
    "No route to host": "no route to the host",
    "Network is unreachable": "the network is unreachable",
    "certificate": "the TLS certificate is not trusted",
}


def wait(
    server: Server,
    *,
    deadline_s: float,
    question: str = QUESTION,
    max_tokens: int = MAX_TOKENS,
    progress: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Poll until a completion comes back healthy or `deadline_s` passes; returns the last verdict.

    One of SETTLED several times in a row (wrong model name or key, garbage) ends it early.
    `progress` gets a line every few seconds.
    """
    started = time.monotonic()
    told = float("-inf")
    refusals = 0
    verdict: Verdict | None = None
    # A last question with no time for its answer would only hide what the one before it said.
    while (left_s := deadline_s - (time.monotonic() - started)) > (0 if verdict is None else LAST_ASK_S):
        health, said = health_status(server, min(HEALTH_DEADLINE_S, left_s))
        # Servers without /health say 404: only a completion can tell then.
        if health in (200, 404, 405):
            left_s = max(0.1, deadline_s - (time.monotonic() - started))
            progress(f"/health says {said}: asking for a completion")
            told = time.monotonic()
            verdict = ask(server, question=question, max_tokens=max_tokens, deadline_s=min(left_s, ATTEMPT_DEADLINE_S))
        elif health is None:
            closed: Kind = "port_closed" if "refused" in said else "unreachable"
            verdict = Verdict(closed, said)
        else:
            verdict = Verdict("not_ready", f"/health says {said}")
        if verdict.healthy:
            return verdict
        refusals = refusals + 1 if verdict.kind in SETTLED else 0
        if refusals >= REFUSALS_TO_GIVE_UP:
            return verdict
        if time.monotonic() - told >= PROGRESS_S or health == 200:
            elapsed_s = time.monotonic() - started
            progress(f"{elapsed_s:.0f} of {deadline_s:.0f} s: {verdict.kind}: {verdict.detail}")
            told = time.monotonic()
        time.sleep(max(0.0, min(POLL_S, deadline_s - (time.monotonic() - started))))
    return verdict or Verdict("timed_out", "the deadline passed before anything was asked")


# ---- the command --------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m laoka.serving.completion", description="Ask a model server for a real completion, and judge it."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, about, default_s in (("ask", "ask once", 30.0), ("wait", "ask until it is healthy or the deadline passes", 900.0)):
        sub = verbs.add_parser(verb, help=about, description=about)
        sub.add_argument("--url", required=True, help="root of the server, such as http://127.0.0.1:8000")
        sub.add_argument("--model", required=True, help="served model name")
        sub.add_argument("--api-key-file", type=Path, help="file that holds the API key (never given on the command line)")
        sub.add_argument("--question", default=QUESTION)
        sub.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
        sub.add_argument(
            "--deadline-s", type=float, default=default_s, help=f"seconds it may take at most (default {default_s:.0f})"
        )
        sub.add_argument("--json", action="store_true", help="the verdict as one JSON object on stdout")
        sub.add_argument(
            "--judge-text",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="judge the words too: empty, one character, repeating (default: yes; turn off for random weights)",
        )
        if verb == "wait":
            sub.add_argument("--stamp", type=Path, help="file to write when the server is healthy")
            sub.add_argument("--stamp-text", default="healthy", help="what to write there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.deadline_s <= 0 or options.max_tokens <= 0:
        return _failed("--deadline-s and --max-tokens must be above zero")
    try:
        key = key_in(options.api_key_file)
    except (OSError, UnicodeDecodeError) as error:
        return _failed(f"--api-key-file {options.api_key_file}: {error}")
    server = Server(options.url, options.model, key, options.judge_text)
    asked = {"question": options.question, "max_tokens": options.max_tokens, "deadline_s": options.deadline_s}
    try:
        if options.verb == "ask":
            verdict = ask(server, **asked)
        else:
            verdict = wait(server, **asked, progress=lambda line: print(line, file=sys.stderr, flush=True))
        if verdict.healthy and options.verb == "wait" and options.stamp:
            write_atomic(options.stamp, f"{options.stamp_text}\n")
    except (ValueError, OSError) as error:
        return _failed(str(error))
    report(verdict, as_json=options.json)
    return 0 if verdict.healthy else 1


def report(verdict: Verdict, *, as_json: bool) -> None:
    """The verdict to stdout; what is not healthy also to stderr, for the journal."""
    if as_json:
        print(json.dumps({**asdict(verdict), "healthy": verdict.healthy}, ensure_ascii=False))
    elif verdict.healthy:
        unjudged = "" if verdict.text_judged else " (words not judged)"
        print(f"healthy: {verdict.detail}{unjudged}: {verdict.answer.strip()[:200]!r}")
    if not verdict.healthy:
        print(f"{verdict.kind}: {verdict.detail}", file=sys.stderr)


def _failed(line: str) -> int:
    print(f"could not ask: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
