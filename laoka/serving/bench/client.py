"""Asks a model server for streamed completions and times them: a small async client on aiohttp, nothing but OpenAI's API.

It sends token ids to /v1/completions with a salt of their own, asks for an exact number of output tokens (`ignore_eos`), counts
tokens by the server's `usage`, and takes the first chunk with something in it for the first token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from laoka.serving.bench.engine_metrics import Snapshot, parse
from laoka.serving.bench.figures import Answer
from laoka.serving.bench.recipe import TEXT, prompt_ids, text_ids
from laoka.serving.guard import Events

LOW_IDS = tuple(range(100, 250))
"""Token ids that every vocabulary has: where a server does not tell ids of a text. A wrong id would be an error in its log."""
METRICS_DEADLINE_S = 10.0
MAX_METRICS_BYTES = 8 * 1024 * 1024


class BenchError(Exception):
    """The server can't be measured; the message is one line."""


@dataclass(frozen=True)
class Target:
    """The server. `url` without /v1; `metrics_url` None: /metrics of the same server, "" for none."""

    url: str
    model: str = ""
    api_key: str = ""
    metrics_url: str | None = None
    deadline_s: float = 600.0

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class ServerFacts:
    """What the server says of itself."""

    model: str
    max_model_len: int | None
    version: str | None
    root: str | None
    """Where its weights lie."""


def version_of(said: object) -> str | None:
    """The version in an answer to /version; None when there is none in it."""
    version = said.get("version") if isinstance(said, dict) else None
    return version if isinstance(version, str) and version else None


@dataclass(frozen=True)
class Tokens:
    """Ids of the recipe's text, by the server's tokenizer: in order, and each once."""

    text: tuple[int, ...]
    known: tuple[int, ...]


def tokens_of(content: Any) -> Tokens:
    """The ids that a server gave to the text; LOW_IDS where it does not tell (before vLLM 0.10.2, or another engine)."""
    try:
        given = content["choices"][0]["prompt_token_ids"] or content["prompt_token_ids"]
        ids = tuple(int(token) for token in given)[1:]  # the first may be the tokenizer's mark of a beginning
    except (KeyError, IndexError, TypeError, ValueError):
        ids = ()
    known = tuple(dict.fromkeys(ids))
    return Tokens(ids, known) if len(known) >= 20 else Tokens(LOW_IDS, LOW_IDS)


@dataclass
class Client:
    """A session with one server. Use it as an async context manager."""

    target: Target
    tokens: Tokens = field(default_factory=lambda: Tokens(LOW_IDS, LOW_IDS))
    read_metrics: Callable[[], Awaitable[str]] | None = None
    """Another way to /metrics than HTTP, where only the host itself reaches it."""
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        headers = {"Authorization": f"Bearer {self.target.api_key}"} if self.target.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.target.deadline_s),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use it as `async with Client(...)`"
        return self._session

    async def facts(self) -> ServerFacts:
        """Model, context and version. Errors: BenchError when the server does not answer, refuses the key, or lacks the model."""
        listed = await self._get_json("/v1/models")
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list) or not rows:
            raise BenchError(f"{self.target.root}: /v1/models lists no model: is it a server of OpenAI's API?")
        names = [str(row.get("id")) for row in rows]
        wanted = self.target.model or names[0]
        if wanted not in names:
            raise BenchError(f"{self.target.root}: there is no model {wanted}; it serves {', '.join(names)}")
        row = rows[names.index(wanted)]
        limit = row.get("max_model_len")
        self.target = replace(self.target, model=wanted)
        try:
            version = version_of(await self._get_json("/version"))
        except BenchError:
            version = None  # a gateway lets only completions through
        return ServerFacts(wanted, limit if isinstance(limit, int) else None, version, row.get("root"))

    async def learn_tokens(self) -> Tokens:
        """Learn from the server which ids its tokenizer gives to a text, and keep them for prompts. Errors: BenchError."""
        body = {"model": self.target.model, "prompt": TEXT, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        try:
            async with self.session.post(f"{self.target.root}/v1/completions", json=body) as answer:
                said = await answer.text()
                if answer.status == 200:
                    self.tokens = tokens_of(json.loads(said))
        except asyncio.TimeoutError:
            raise BenchError(f"{self.target.root}: no completion within {self.target.deadline_s:.0f} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise BenchError(f"{self.target.root}: no completion: {error or type(error).__name__}") from None
        if answer.status in (401, 403):
            raise BenchError(f"{self.target.root}: it wants an API key: --api-key-file FILE")
        if answer.status != 200:
            raise BenchError(f"{self.target.root}: no completion: HTTP {answer.status}: {_words(said)}")
        return self.tokens

    async def complete(self, ids: Sequence[int], output_tokens: int, salt: str | None = None) -> Answer:
        """One streamed completion of exactly so many tokens. What goes wrong is told in the answer's `error`."""
        body = {
            "model": self.target.model, "prompt": list(ids), "max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt or secrets.token_hex(16),
        }  # fmt: skip
        started_s = time.perf_counter()
        try:
            async with self.session.post(f"{self.target.root}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    return Answer(error=f"HTTP {answer.status}: {_words(await answer.text())}")
                return await _read(answer.content, started_s)
        except asyncio.TimeoutError:
            return Answer(error=f"no end within {self.target.deadline_s:.0f} s")
        except (aiohttp.ClientError, OSError) as error:
            return Answer(error=f"{type(error).__name__}: {error}")

    async def batch(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int, salts: Sequence[str] | None = None
    ) -> tuple[list[Answer], float]:
        """All prompts, `concurrency` at once, the next one when a seat is free: answers in order, and seconds in all."""
        seats = asyncio.Semaphore(concurrency)

        async def one(number: int) -> Answer:
            async with seats:
                return await self.complete(prompts[number], output_tokens, salts[number] if salts else None)

        started_s = time.perf_counter()
        answers = await asyncio.gather(*(one(number) for number in range(len(prompts))))
        return list(answers), time.perf_counter() - started_s

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """So many new prompts of so many tokens at random; no two runs have the same, so no prefix was ever there before."""
        rng = random.SystemRandom()
        return [prompt_ids(tokens, self.tokens.known, rng) for _ in range(count)]

    def text_prompts(self, count: int, tokens: int) -> list[list[int]]:
        """So many pieces of the text, the same in every run: what speculative decoding yields depends on what is written."""
        return [text_ids(tokens, self.tokens.text, number) for number in range(count)]

    async def snapshot(self) -> Snapshot | None:
        """/metrics at this moment; None when it can't be read."""
        if self.read_metrics is not None:
            return parse(await self.read_metrics())
        if self.target.metrics_url == "":
            return None
        url = self.target.metrics_url or f"{self.target.root}/metrics"
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=METRICS_DEADLINE_S)) as answer:
                if answer.status != 200:
                    return None
                return parse((await answer.content.read(MAX_METRICS_BYTES)).decode(errors="replace") + await _rest(answer))
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return None

    async def _get_json(self, path: str) -> Any:
        url = self.target.root + path
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as answer:
                text = await answer.text()
        except aiohttp.InvalidURL:
            raise BenchError(f"{self.target.url}: not a URL: write http://HOST:PORT") from None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
            raise BenchError(
                f"{self.target.root}: no answer: {error or type(error).__name__} (on its host: systemctl status qwen-serve)"
            ) from None
        if answer.status in (401, 403):
            raise BenchError(f"{self.target.root}: it wants an API key: --api-key-file FILE")
        if answer.status != 200:
            raise BenchError(f"{self.target.root}{path}: HTTP {answer.status}: {_words(text)}")
        try:
            return json.loads(text)
        except ValueError:
            raise BenchError(f"{self.target.root}{path}: the answer is not JSON: is it a server of OpenAI's API?") from None


async def _rest(answer: aiohttp.ClientResponse) -> str:
    """What `read(n)` left: it may return early."""
    pieces = b""
    while len(pieces) < MAX_METRICS_BYTES and (piece := await answer.content.read(65536)):
        pieces += piece
    return pieces.decode(errors="replace")


async def _read(content: aiohttp.StreamReader, started_s: float) -> Answer:
    """Time a stream of server-sent events."""
    events, stamps = Events(), []
    usage: Mapping[str, Any] = {}
    finish = ""
    async for piece in content.iter_any():
        now_s = time.perf_counter()
        for event in events.feed(piece):
            data = event.strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]" or data.startswith(b":"):
                continue
            try:
                said = json.loads(data)
            except ValueError:
                return Answer(error=f"a chunk is not JSON: {data[:80]!r}")
            if "error" in said:
                return Answer(error=_words(data.decode(errors="replace")))
            usage = said.get("usage") or usage
            for choice in said.get("choices") or ():
                # Chat opens with a chunk that has a role and nothing else; completions have no such chunk, and an empty text
                # is a token whose text is not whole yet.
                delta = choice.get("delta")
                if delta is None or delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content"):
                    stamps.append(now_s)
                finish = choice.get("finish_reason") or finish
    if not stamps:
        return Answer(error="the stream ended without a token")
    if finish in ("abort", "error"):
        return Answer(error=f"the server ended it with finish_reason {finish}")
    output = usage.get("completion_tokens")
    prompt = usage.get("prompt_tokens")
    if not isinstance(output, int) or not isinstance(prompt, int):
        return Answer(error="the stream has no usage: the server must know stream_options.include_usage")
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(stamps))
    return Answer(prompt, output, stamps[0] - started_s, gaps, stamps[-1] - started_s, cached)


def _words(body: str) -> str:
    """What an error answer says, in one short line."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = body
    line = " ".join(str(text).split())
    return line[:200] or "no words"
