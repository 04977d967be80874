"""The client against a real HTTP server that streams as vLLM does: what counts as the first token, what is an error."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from laoka.cli.bench import show
from laoka.serving.bench.client import LOW_IDS, BenchError, Client, Target
from laoka.serving.bench.compare import compare
from laoka.serving.bench.engine_metrics import Span
from laoka.serving.bench.recipe import TEXT, Recipe
from laoka.serving.bench.run import Cell, banners_of, measure, result_of, server_tpot_ms
from laoka.serving.bench.tables import as_csv, picture

VOCABULARY = 320


class Server:
    """Speaks as vLLM 0.32 does; each request's body is kept. `tokens_per_chunk` as speculative decoding sends them."""

    def __init__(
        self, *, tokens_per_chunk: int = 1, gap_s: float = 0.0, first_s: float = 0.0, cut: int | None = None, gathers: bool = False
    ) -> None:
        self.tokens_per_chunk, self.gap_s, self.first_s, self.cut = tokens_per_chunk, gap_s, first_s, cut
        self.tells_ids = True
        self.gathers = gathers
        """Whether an answer is held back and sent in one piece, as by a proxy, or to a client that is too busy to read."""
        self.bodies: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.headers.get("Authorization") != "Bearer a-key":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if body.get("return_token_ids"):
            ids = [0, *(token % VOCABULARY for token in body["prompt"].encode())] if self.tells_ids else None
            return web.json_response({"choices": [{"text": "x", "prompt_token_ids": ids}]})
        assert max(body["prompt"]) < VOCABULARY, "a wrong id would be an error in the server's log"
        self.bodies.append(body)
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        wanted = body["max_tokens"] if self.cut is None else min(self.cut, body["max_tokens"])
        await asyncio.sleep(self.first_s)
        if self.gathers:
            events = [{"choices": [{"index": 0, "text": "a"}]} for _ in range(0, wanted, self.tokens_per_chunk)]
            pieces = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            await answer.write(pieces)
            wanted, told = 0, wanted
        else:
            told = wanted
        for sent in range(0, wanted, self.tokens_per_chunk):
            last = sent + self.tokens_per_chunk >= wanted
            await self.send(answer, {"choices": [{"index": 0, "text": "", "finish_reason": "length" if last else None}]})
            await asyncio.sleep(0 if last else self.gap_s)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": told, "prompt_tokens_details": {"cached_tokens": 0}}
        await self.send(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        self.busy -= 1
        return answer

    async def send(self, answer: web.StreamResponse, content: object) -> None:
        await answer.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer a-key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096, "root": "/srv/m"}]})


@asynccontextmanager
async def running(server: Server, *extra: web.RouteDef) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", server.completions), web.get("/v1/models", server.models), *extra])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def with_client(server: Server, work: Callable[[Client], Awaitable[Any]], *extra: web.RouteDef, key: str = "a-key") -> Any:
    async def main() -> Any:
        async with running(server, *extra) as url, Client(Target(url, api_key=key)) as client:
            return await work(client)

    return asyncio.run(main())


def test_a_request_is_exact_and_no_prefix_can_be_cached() -> None:
    server = Server()

    async def work(client: Client) -> None:
        assert len((await client.learn_tokens()).known) > 50
        for prompt in client.prompts(2, 40):
            answer = await client.complete(prompt, 5)
            assert (answer.error, answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == ("", 40, 5, 0)
            assert len(answer.gaps_s) == 4

    with_client(server, work)
    first, second = server.bodies[-2:]
    assert first["ignore_eos"] and first["stream_options"] == {"include_usage": True} and first["max_tokens"] == 5
    assert first["cache_salt"] != second["cache_salt"] and first["prompt"] != second["prompt"] and len(first["prompt"]) == 40
    assert all(isinstance(token, int) for token in first["prompt"])


@pytest.mark.parametrize("tells", [True, False])
def test_prompts_are_made_of_ids_that_the_server_knows(tells: bool) -> None:
    server = Server()
    server.tells_ids = tells

    async def work(client: Client) -> Any:
        return await client.learn_tokens(), client.prompts(1, 400)[0], client.text_prompts(2, 32)

    tokens, prompt, texts = with_client(server, work)
    assert set(prompt) <= set(tokens.known) and len(prompt) == 400 and [len(piece) for piece in texts] == [32, 32]
    if tells:
        assert bytes(texts[0]).decode() == TEXT[:32] and bytes(texts[1]).decode() == TEXT[32:64]
    else:
        assert tokens.known == LOW_IDS


def test_chunks_are_timed_and_tokens_are_the_server_s_count() -> None:
    async def work(client: Client) -> Any:
        return await client.complete([1, 2, 3], 8)

    answer = with_client(Server(tokens_per_chunk=4, first_s=0.05, gap_s=0.1), work)
    assert answer.output_tokens == 8 and len(answer.gaps_s) == 1 and answer.tokens_per_chunk == 4
    assert answer.ttft_s >= 0.05 and answer.gaps_s[0] >= 0.09
    assert answer.latency_s == pytest.approx(answer.ttft_s + sum(answer.gaps_s))


def test_the_first_chunk_of_a_chat_is_no_token() -> None:
    server = Server()

    async def chat(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await server.send(answer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.1)
        await server.send(answer, {"choices": [{"delta": {"content": "a"}}]})
        await server.send(answer, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
        return answer

    async def work(client: Client) -> Any:
        client.target = Target(client.target.url + "/chat", api_key="a-key")
        return await client.complete([1], 1)

    answer = with_client(server, work, web.post("/chat/v1/completions", chat))
    assert answer.error == "" and answer.ttft_s >= 0.09 and answer.gaps_s == ()


def test_no_more_than_so_many_at_once() -> None:
    server = Server(first_s=0.01)

    async def work(client: Client) -> Any:
        return await client.batch([[1]] * 9, 1, 3)

    answers, duration_s = with_client(server, work)
    assert len(answers) == 9 and server.most_busy == 3 and duration_s >= 0.03


@pytest.mark.parametrize(
    ("path", "status", "body", "says"),
    [
        ("http", 503, {"error": {"message": "no seat"}}, "HTTP 503: no seat"),
        ("end", 200, "", "without a token"),
        ("junk", 200, "data: {no json\n\n", "not JSON"),
        ("error", 200, 'data: {"error": {"message": "engine died"}}\n\n', "engine died"),
        ("abort", 200, 'data: {"choices": [{"text": "x", "finish_reason": "abort"}]}\n\n', "finish_reason abort"),
        ("usage", 200, 'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n', "no usage"),
    ],
)
def test_what_goes_wrong_is_an_answer_with_an_error(path: str, status: int, body: Any, says: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    async def work(client: Client) -> Any:
        client.target = Target(f"{client.target.url}/{path}", api_key="a-key")
        return await client.complete([1], 1)

    answer = with_client(Server(), work, web.post(f"/{path}/v1/completions", handler))
    assert says in answer.error and "\n" not in answer.error


def test_a_server_that_is_none_is_told_in_one_line() -> None:
    async def facts(client: Client) -> Any:
        return await client.facts()

    with pytest.raises(BenchError, match="wants an API key"):
        with_client(Server(), facts, key="")

    async def other(client: Client) -> Any:
        client.target = Target(client.target.url, model="gpt", api_key="a-key")
        return await client.facts()

    with pytest.raises(BenchError, match="no model gpt; it serves m"):
        with_client(Server(), other)

    async def nobody() -> None:
        async with Client(Target("http://127.0.0.1:9")) as client:
            await client.facts()

    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:9: no answer"):
        asyncio.run(nobody())


SOURCE = {"engine_version": None, "model": "m", "url": "u", "cards_during": [], "simulated": True}
SMALL = Recipe(16, 4, (1, 2), 2, 2, 1, 10, 2, 4, 6, 1)


def test_a_whole_run() -> None:
    async def work(client: Client) -> Any:
        facts = await client.facts()
        return await measure(client, SMALL, facts.max_model_len, None, lambda line: None)

    server = Server()
    cells = with_client(server, work)
    assert [cell.label for cell in cells] == ["serve 4096 c1", "serve 4096 c2", "prefill 4096", "decode 4096"]
    assert all(len(cell.repeats) == 2 for cell in cells) and cells[1].repeats[0]["max_concurrency"] == 2
    assert len({body["cache_salt"] for body in server.bodies}) == len(server.bodies)
    result = result_of(SMALL, cells, {"simulated": True, "model": "m"}, ())
    assert result["recipe"]["server_limits"] == [4096] and len(as_csv(result).splitlines()) == 1 + 4 * 2
    assert picture(result).startswith("<svg") and "SIMULATED" in picture(result)


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 4])
def test_an_answer_that_came_in_one_piece_is_told_and_not_timed(tokens_per_chunk: int) -> None:
    async def work(client: Client) -> Any:
        return await measure(client, SMALL, 4096, None, lambda line: None)

    cells = with_client(Server(gathers=True, first_s=0.01, tokens_per_chunk=tokens_per_chunk), work)
    result = result_of(SMALL, cells, {"simulated": True, "model": "m"}, ())
    found = {cell["label"]: cell for cell in result["cells"]}
    for label, figure, others in (("decode 4096", "decode_tok_s", 1), ("serve 4096 c2", "mean_tpot_ms", 4)):
        assert [row[figure] for row in found[label]["repeats"]] == [None, None] and figure not in found[label]["spread"], label
        assert [row["bunched"] for row in found[label]["repeats"]] == [others, others]
        assert found[label]["spread"]["output_throughput"]["mean"] > 0 and found[label]["spread"]["mean_ttft_ms"]["mean"] >= 10
    assert found["prefill 4096"]["spread"]["prefill_tok_s"]["mean"] > 0
    bunched = [banner["values"] for banner in result["banners"] if banner["id"] == "bench.bunched"]
    assert {"cell": "decode 4096", "count": 2, "total": 2} in bunched and len(bunched) == 3
    assert picture(result).startswith("<svg")
    rows = list(csv.DictReader(as_csv(result).splitlines()))
    assert all(row["decode_tok_s"] == "" and row["mean_itl_ms"] == "" for row in rows if row["kind"] == "decode")
    shown = io.StringIO()
    show({**result, "provenance": SOURCE}, Console(file=shown, width=160), "en")
    assert "decode speed could not be measured" in shown.getvalue() and "BUNCHED: decode 4096: 2 of 2 answers" in shown.getvalue()
    show({**result, "provenance": SOURCE}, Console(file=shown, width=160), "zh")
    assert "无法测出解码速度" in shown.getvalue()
    lines = {(line.cell, line.figure): line for line in compare(result, result)}
    assert lines["decode 4096", "decode_tok_s"].judgement == "not measured"


def test_tokens_that_lay_on_the_way_are_told_by_the_servers_own_clock() -> None:
    def cell(here_ms: float | None, server_ms: float, requests: float = 2) -> Cell:
        row = {"num_prompts": 2, "completed": 2, "failed": 0, "bunched": 0, "total_output_tokens": 512, "mean_tpot_ms": here_ms}
        span = Span(1024, 512, 1024, 0, 0, requests, None, None, None, (), {"tpot": server_ms})
        return Cell("serve", "serve c1", None, (row,), span)

    def said(*values: Any) -> list[str]:
        return [banner.key for banner in banners_of(SMALL, [cell(*values)])]

    assert said(0.37, 0.85) == ["bench.late"] and said(8.9, 10.0) == ["bench.late"]
    assert said(9.1, 10.0) == said(12.0, 10.0) == said(None, 10.0) == []
    assert said(0.37, 0.85, 3) == [], "the server's mean is of other requests too"
    assert server_tpot_ms(None, ()) is None


def test_measured_cache_sends_each_prompt_twice_under_one_salt() -> None:
    async def work(client: Client) -> Any:
        return await measure(client, Recipe(16, 4, (1,), 1, 1, 0, 10, 2, 4, 6, 1, "measured"), 4096, None, lambda line: None)

    server = Server()
    cells = with_client(server, work)
    assert [cell.kind for cell in cells] == ["serve", "prefill", "prefill-again", "decode"]
    first, second = ([(body["cache_salt"], body["prompt"]) for body in server.bodies[a:b]] for a, b in ((-5, -3), (-3, -1)))
    assert first == second and len(first) == 2


def test_a_limit_that_cuts_answers_short_is_no_measurement() -> None:
    async def work(client: Client) -> Any:
        return await measure(client, SMALL, None, None, lambda line: None)

    with pytest.raises(BenchError, match="counted 16 prompt and 3 output tokens"):
        with_client(Server(cut=3), work)
