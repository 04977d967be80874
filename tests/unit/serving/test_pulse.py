"""Signs of life: counters that move, completions that come; and how an engine that shows none is described."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from laoka.serving.completion import Server, Verdict
from laoka.serving.progress import Progress, parse_progress
from laoka.serving.pulse import Beat, Pulse
from tests.hosts import until
from tests.unit.serving.test_completion import FakeServer, closed_port, fake  # noqa: F401 - a fixture

METRICS = Path(__file__).parents[2] / "data" / "serving"


def test_the_real_metrics_of_an_idle_and_of_a_used_engine() -> None:
    idle = parse_progress((METRICS / "vllm-0.32.0-metrics-idle.txt").read_text())
    used = parse_progress((METRICS / "vllm-0.32.0-metrics-used.txt").read_text())
    assert idle == Progress(0, 0, 0.0)
    # vllm bench had sent 8 prompts of 512 tokens for 256 tokens each; the engine's steps come on top.
    assert used is not None and used.moved > 8 * (512 + 256) and (used.running, used.waiting) == (0, 0)


def test_several_engines_of_one_server_are_summed() -> None:
    text = "\n".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n + 1}.0\nvllm:num_requests_waiting{{engine="{n}"}} 2.0\n'
        f'vllm:generation_tokens_total{{engine="{n}",model_name="a b"}} 1.5e+02'
        for n in (0, 1)
    )
    assert parse_progress(text) == Progress(3, 4, 300.0)


def test_metrics_of_something_else_are_none() -> None:
    assert parse_progress("") is None
    assert parse_progress("http_requests_total 5\nvllm:num_requests_running 3.0\n") is None
    assert parse_progress('vllm:generation_tokens_total{engine="0"} NaN\n') is None


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    parse_progress(text)
    parse_progress(f"vllm:generation_tokens_total {text}")


def test_an_idle_engine_is_asked_and_its_answer_is_a_sign_of_life(fake: FakeServer) -> None:  # noqa: F811
    now = [100.0]
    pulse = Pulse(Server(fake.url, "m"), ask_after_s=5, clock=lambda: now[0])
    pulse.note()
    now[0] += 4
    assert pulse.look().silent_s == 4 and fake.asked == []
    now[0] += 2
    pulse.look()
    until(lambda: pulse.silent_s() == 0, 30, "its answer came")
    assert [asked["max_tokens"] for asked in fake.asked] == [1]


def test_counters_that_move_are_a_sign_of_life_and_nothing_is_asked(fake: FakeServer) -> None:  # noqa: F811
    now, count = [0.0], [0]
    fake.metrics = lambda: f"vllm:generation_tokens_total {count[0]}\n"
    pulse = Pulse(Server(fake.url, "m"), ask_after_s=5, clock=lambda: now[0])
    pulse.note()
    for _ in range(5):
        now[0] += 4
        count[0] += 1
        silent_s = pulse.look().silent_s
    assert silent_s == 0 and fake.asked == []


def test_what_passed_by_counts_too(fake: FakeServer) -> None:  # noqa: F811
    now = [0.0]
    pulse = Pulse(Server(fake.url, "m"), ask_after_s=5, clock=lambda: now[0])
    now[0] += 50
    pulse.note()
    assert pulse.silent_s() == 0


def test_one_that_was_never_seen_alive_is_asked_at_once(fake: FakeServer) -> None:  # noqa: F811
    pulse = Pulse(Server(fake.url, "m"), ask_after_s=5)
    assert not pulse.seen
    pulse.look()
    until(lambda: pulse.seen, 30, "its answer came")
    assert pulse.down == ""


def test_a_closed_port_and_an_engine_that_says_it_is_dead_are_down_at_once(fake: FakeServer) -> None:  # noqa: F811
    closed = Pulse(Server(f"http://127.0.0.1:{closed_port()}", "m"), ask_after_s=5)
    closed.look()
    assert "refused" in closed.down
    fake.health = 503
    dead = Pulse(Server(fake.url, "m"), ask_after_s=5)
    dead.look()
    assert "503" in dead.down and fake.asked == []


def test_the_evidence_says_whether_it_was_busy() -> None:
    late = Verdict("engine_frozen", "no completion within 18 s, while /health answers 200")
    busy = Beat(31.4, late, Progress(2, 1, 5.0)).words()
    assert busy == "2 requests running and 1 waiting, but no token for 31 s; no completion within 18 s, while /health answers 200"
    assert Beat(31.4, None, Progress(0, 0, 5.0)).words() == "no sign of life for 31 s"
    assert Beat(31.4, None, None).words() == "no sign of life for 31 s"
