"""`laoka bench` as it is called: what is asked before anything is restarted, and words that make no sense."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from laoka.cli import bench
from laoka.cli.main import cli
from laoka.serving.bench.host_side import HostSide
from tests.unit.serving.test_bench_client import Server, with_client


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A host that serves, whose restarts are written down instead of done."""
    done: list[Any] = []

    @contextmanager
    def changes(self: HostSide, deadline_s: float, say: Any) -> Iterator[Any]:
        yield done.append

    monkeypatch.setattr(HostSide, "changes", changes)
    monkeypatch.setattr(HostSide, "flags", lambda self: {"port": 8000, "speculative-config": '{"method":"mtp"}'})
    monkeypatch.setattr(HostSide, "metrics", lambda self, port: "")
    monkeypatch.setattr(bench, "report_of", lambda host: None)
    return done


def said(words: list[str]) -> tuple[int, str]:
    """Exit status and what was said of a call."""
    found = CliRunner().invoke(cli, ["bench", *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


WAYS = (["--baseline"], ["--limits", "4096,8192"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rest", [["--yes"], ["--dry"], []])
def test_a_url_that_does_not_answer_is_told_before_anything_is_restarted(
    restarts: list[Any], way: list[str], rest: list[str]
) -> None:
    status, output = said(["http://127.0.0.1:9", "--host", "@local", *way, *rest])
    assert status != 0 and "http://127.0.0.1:9: no answer" in output and "restarts" not in output and restarts == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("key", "wants an API key"),
        ("html", "not JSON"),
        ("models only", "no completion: HTTP 503: no engine"),
        ("model", "no model"),
    ],
)
def test_a_server_that_can_not_be_measured_is_told_before_anything_is_restarted(
    restarts: list[Any], way: list[str], fault: str, says: str, tmp_path: Path
) -> None:
    server = Server()
    key = tmp_path / "key"
    key.write_text("wrong" if fault == "key" else "a-key")

    async def html(request: web.Request) -> web.Response:
        return web.Response(text="<html><body>It works!</body></html>", content_type="text/html")

    async def models(request: web.Request) -> web.Response:
        return await server.models(request)

    async def down(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no engine"}}, status=503)

    async def work(client: Any) -> tuple[int, str]:
        url = client.target.url + {"html": "/html", "models only": "/down"}.get(fault, "")
        more = ["--model", "gpt"] if fault == "model" else []
        words = [url, "--host", "@local", "--api-key-file", str(key), *way, "--yes", *more]
        return await asyncio_thread(said, words)

    routes = (web.get("/html/v1/models", html), web.get("/down/v1/models", models), web.post("/down/v1/completions", down))
    status, output = with_client(server, work, *routes)
    assert status != 0 and says in output and restarts == [], output


def test_a_limit_that_the_recipe_does_not_fit_in_is_told_before_anything_is_restarted(restarts: list[Any], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key")

    async def work(client: Any) -> tuple[int, str]:
        words = [client.target.url, "--host", "@local", "--api-key-file", str(tmp_path / "key"), "--yes", "--limits", "4096,700"]
        return await asyncio_thread(said, words)

    status, output = with_client(Server(), work)
    assert status != 0 and "max-model-len is 700" in output and restarts == []


async def asyncio_thread(function: Any, *words: Any) -> Any:
    import asyncio

    return await asyncio.to_thread(function, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["http://127.0.0.1:9", "--baseline"], "--host"),
        (["http://127.0.0.1:9", "--limits", "4096"], "--host"),
        (["http://127.0.0.1:9", "--limits", "a"], "whole numbers"),
        (["http://127.0.0.1:9", "--goodput", "ttft:nan"], "--goodput ttft:nan"),
        (["http://127.0.0.1:9", "--goodput", "tpot:-1"], "--goodput tpot:-1"),
        (["http://127.0.0.1:9", "--host", "@local", "--baseline", "--limits", "4096"], "without --limits and --goodput"),
        (["http://127.0.0.1:9", "-o", "/no/such/folder/today"], "no folder that can be written to"),
        (["ramp", "http://127.0.0.1:9", "-o", "/no/such/folder/today"], "no folder that can be written to"),
        (["127.0.0.1:9"], "write a URL"),
        (["http://"], "not a URL"),
        (["ftp://127.0.0.1"], "ftp://127.0.0.1"),
        (["http://127.0.0.1:99999"], "http://127.0.0.1:99999"),
    ],
)
def test_words_that_make_no_sense_are_told_in_a_line(restarts: list[Any], words: list[str], says: str) -> None:
    status, output = said(words)
    assert status != 0 and says in output and "Traceback" not in output and restarts == []


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00k", "schl\u00fcssel".encode(), b"a\x00b"])
def test_a_key_file_that_holds_no_key_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    status, output = said(["http://127.0.0.1:9", "--api-key-file", str(tmp_path / "key")])
    assert status != 0 and "--api-key-file" in output


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfa-key\r\n", b"me a-key\n", b"a-key"])
def test_keys_of_any_editor_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    assert bench.read_key(str(tmp_path / "key")) == "a-key"


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF\x02\x00\xff", b"[]", b"{}", b"null", b'{"laoka_bench": 1}', b'{"laoka_baseline": 1}', b"[" * 100000, b"<html>"],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    for words in (
        ["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")],
        ["compare", str(tmp_path), str(tmp_path / "a.json")],
    ):
        status, output = said(words)
        assert status != 0 and "Traceback" not in output and output.strip(), output
    planned = CliRunner().invoke(
        cli, ["plan", "--gpu", "4xv100-sxm2-32gb", "--ramp", str(tmp_path / "a.json")], standalone_mode=False
    )
    assert planned.return_value == 2 and "not a result of laoka bench ramp" in planned.output, planned.output


def test_a_comparison_of_what_was_not_measured_is_json_and_words(tmp_path: Path) -> None:
    row: Mapping[str, Any] = {"failed": 0, "num_prompts": 2, "decode_tok_s": None, "mean_tpot_ms": 1.0}
    cell = {"kind": "decode", "label": "decode", "repeats": [row, row]}
    content = {"laoka_bench": 1, "recipe": {}, "cells": [cell], "banners": [], "provenance": {}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    files = [str(tmp_path / "a.json")] * 2
    assert "not measured" in said(["compare", *files])[1]
    lines = json.loads(said(["compare", *files, "--json"])[1])["lines"]
    assert (lines[0]["first"], lines[0]["ratio"], lines[0]["judgement"]) == (None, None, "not measured")
    assert "未测出" in CliRunner().invoke(cli, ["--lang", "zh", "bench", "compare", *files]).output
