"""Error answers in OpenAI's form, one for each reason to refuse a request: what the gateway and its guard say. Pure.

A client library reads `error.message`, `type`, `param` and `code` and makes its own exception of the HTTP status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """One refusal. `param` is the field of the request that is at fault; `retry_after_s` None: the same request fails again."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def type(self) -> str:
        """OpenAI's name of the kind of error."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> str:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False)

    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        found = {"Content-Type": "application/json", "Cache-Control": "no-store"}
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        return found

    def event(self) -> bytes:
        """The same within a stream that has begun: there is no status any more."""
        return f"data: {self.body()}\n\n".encode()


def gateway_refusals(*, max_body_bytes: int, queue_s: int, paths: tuple[str, ...]) -> Mapping[str, Refusal]:
    """What HAProxy itself answers, by the name of its file.

    Arguments: the limits that the messages name; `queue_s` is how long a request waits in line at most.
    """
    served = ", ".join(paths)
    return {
        "400": Refusal(400, "bad_request", "this is not a valid HTTP request"),
        "401": Refusal(401, "invalid_api_key", "no valid API key: send one as `Authorization: Bearer KEY`"),
        "404": Refusal(404, "unknown_path", f"this path is not served here; there are {served}"),
        "405": Refusal(405, "method_not_allowed", "this path does not take this method: POST a completion, GET the rest"),
        "408": Refusal(408, "request_timeout", "the request did not arrive in time"),
        "411": Refusal(411, "length_required", "send the request with a Content-Length"),
        "413": Refusal(413, "request_too_large", f"the request is larger than {max_body_bytes} bytes"),
        "429": Refusal(429, "too_many_requests", "every seat and every place in line is taken: try again", None, 5),
        "500": Refusal(500, "gateway_error", "the gateway failed"),
        "502": Refusal(502, "no_answer", "the model server ended the connection without an answer: try again", None, 5),
        "503": Refusal(503, "no_seat", f"no seat came free within {queue_s} s, or the model server went away: try again", None, 10),
        "504": Refusal(504, "no_answer_in_time", "the model server did not answer in time", None, 10),
        "down": Refusal(503, "model_down", "the model server is down, starting or being changed: try again", None, 30),
    }
