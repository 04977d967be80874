"""What is let in to the model, and what is refused with which words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving.admission import Admitted, Limits, admit, text_length
from laoka.serving.openai_error import Refusal, gateway_refusals

LIMITS = Limits(max_body_bytes=1000, max_prompt_chars=20, max_tokens=100, max_choices=2)
HELLO = [{"role": "user", "content": "hello"}]


def judged(**body: object) -> Admitted | Refusal:
    return admit(json.dumps(body).encode(), LIMITS)


def test_an_ordinary_request_goes_on_byte_for_byte() -> None:
    raw = b'{"messages": [{"role":"user", "content":"hello"}],  "max_tokens": 100}'
    assert admit(raw, LIMITS) == Admitted(raw, False, False)


def test_a_stream_counts_its_tokens_and_hides_them_from_who_did_not_ask() -> None:
    found = judged(messages=HELLO, stream=True, stream_options={"continuous_usage_stats": False})
    assert isinstance(found, Admitted) and found.stream and found.usage_hidden
    assert json.loads(found.body)["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}
    asked = judged(messages=HELLO, stream=True, stream_options={"include_usage": True})
    assert isinstance(asked, Admitted) and asked.stream and not asked.usage_hidden


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"), (b"{", "invalid_json"), (b'{"a": }', "invalid_json"), (b"[]", "invalid_json"),
        (b"null", "invalid_json"), (b"\xff\xfe", "invalid_json"), (b"[" * 100000, "invalid_json"),
        (b'{"stream": true, "stream_options": 3}', "invalid_type"),
    ],
)  # fmt: skip
def test_what_is_no_request(raw: bytes, code: str) -> None:
    found = admit(raw, LIMITS)
    assert isinstance(found, Refusal) and (found.status, found.code) == (400, code)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"max_tokens": 101}, "max_tokens_too_large", "max_tokens"),
        ({"max_completion_tokens": 1e9}, "max_tokens_too_large", "max_completion_tokens"),
        ({"n": 3}, "too_many_choices", "n"),
        ({"best_of": 5}, "too_many_choices", "best_of"),
        ({"prompt": "x" * 21}, "context_length_exceeded", "prompt"),
        ({"prompt": ["x" * 11, "y" * 10]}, "context_length_exceeded", "prompt"),
        ({"prompt": list(range(21))}, "context_length_exceeded", "prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 20}]}]}, "context_length_exceeded", "messages"),
    ],
)
def test_what_is_over_a_limit_names_the_field(body: dict[str, object], code: str, param: str) -> None:
    found = judged(**body)
    assert isinstance(found, Refusal) and (found.status, found.code, found.param) == (400, code, param)


def test_what_is_not_ours_to_judge_goes_to_the_engine() -> None:
    for body in ({"max_tokens": "many"}, {"max_tokens": True}, {"n": None}, {"messages": 5}, {}):
        assert isinstance(judged(**body), Admitted)
    assert isinstance(admit(b'{"max_tokens": 10000000}', Limits(9, 9, None, 2)), Admitted)


def test_pictures_are_no_text() -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 10**6}}]
    assert text_length([{"role": "user", "content": parts}]) < 50


def test_a_refusal_never_repeats_the_prompt() -> None:
    for raw in (b'{"messages": "my secret" oops}', json.dumps({"prompt": "my secret " * 9, "n": 9}).encode()):
        found = admit(raw, LIMITS)
        assert isinstance(found, Refusal) and "secret" not in found.body()


@given(st.binary(max_size=300))
def test_no_bytes_break_it(raw: bytes) -> None:
    assert isinstance(admit(raw, LIMITS), (Admitted, Refusal))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "max_tokens", "n", "stream", "stream_options"]), JSON))
def test_no_json_breaks_it(body: dict[str, object]) -> None:
    found = admit(json.dumps(body).encode(), LIMITS)
    if isinstance(found, Admitted):
        assert json.loads(found.body).items() >= {key: value for key, value in body.items() if key != "stream_options"}.items()


# ---- the words ----


def test_every_refusal_of_the_gateway_has_openais_form() -> None:
    refusals = gateway_refusals(max_body_bytes=1000, queue_s=60, paths=("/v1/models",))
    for name, refusal in refusals.items():
        error = json.loads(refusal.body())["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"]
        assert name == "down" or int(name) == refusal.status
        assert (refusal.retry_after_s is not None) == (refusal.status in (429, 502, 503, 504))
    assert "1000 bytes" in refusals["413"].message and "60 s" in refusals["503"].message
    assert refusals["401"].headers()["WWW-Authenticate"] == "Bearer"
