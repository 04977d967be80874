"""The lab's endpoint keeps alerts and serves model files, resumably and nothing outside its folder."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from laoka.sandbox import endpoint


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    (tmp_path / "mirror" / "org").mkdir(parents=True)
    (tmp_path / "mirror" / "org" / "file.bin").write_bytes(b"0123456789")
    (tmp_path / "secret").write_text("no")
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), endpoint.make_handler(tmp_path / "alerts.jsonl", tmp_path / "mirror")
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", tmp_path
    server.shutdown()
    server.server_close()


def test_alerts_are_kept_in_order(served: tuple[str, Path]) -> None:
    url, folder = served
    requests.post(f"{url}/alerts", json={"title": "一号"}, timeout=5)
    requests.post(f"{url}/alerts", data="plain", timeout=5)
    assert [alert["content"] for alert in endpoint.read_alerts(folder / "alerts.jsonl")] == [{"title": "一号"}, "plain"]


def test_files_resume_by_range(served: tuple[str, Path]) -> None:
    url, _ = served
    whole = requests.get(f"{url}/org/file.bin", timeout=5)
    rest = requests.get(f"{url}/org/file.bin", headers={"Range": "bytes=7-"}, timeout=5)
    assert (whole.status_code, whole.content, rest.status_code, rest.content) == (200, b"0123456789", 206, b"789")


@pytest.mark.parametrize("path", ["/../secret", "/%2e%2e/secret", "/org", "/none"])
def test_nothing_outside_the_folder(served: tuple[str, Path], path: str) -> None:
    url, _ = served
    with requests.Session() as session:
        request = session.prepare_request(requests.Request("GET", url))
        request.url = url + path  # requests would tidy the dots away
        assert session.send(request, timeout=5).status_code == 404


def test_no_alerts_file_means_no_alerts(tmp_path: Path) -> None:
    assert endpoint.read_alerts(tmp_path / "none") == []
