"""Stands for `vllm serve` where a test needs its manners, not its answers: `fake_engine.py PORT CONTROL_FILE [WORD ...]`.

The control file says what it does, read at every request: "ok", "hang" (completions never come, /health stays 200), "busy" (the
same, but the counters of /metrics move), "garbage". The words are how it starts: "bad-flag", "no-model", "exit-0-after=SECONDS",
"slow=SECONDS". What it was given as environment stands in CONTROL_FILE.env.
"""

from __future__ import annotations

import ctypes
import http.server
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

PORT, CONTROL = int(sys.argv[1]), Path(sys.argv[2])
WORDS = dict(word.partition("=")[::2] for word in sys.argv[3:])
COUNT = itertools.count()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            moved = next(COUNT) if CONTROL.read_text().strip() == "busy" else 7
            self.answer(
                f'vllm:num_requests_running{{engine="0"}} 1.0\nvllm:generation_tokens_total{{engine="0"}} {moved}.0\n'.encode()
            )
        else:
            self.answer(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        mode = CONTROL.read_text().strip()
        while mode in ("hang", "busy"):
            time.sleep(0.05)
            mode = CONTROL.read_text().strip()
        said = "!!!!!!!!" if mode == "garbage" else "5"
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        self.answer(json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


PR_SET_PDEATHSIG = 1


def main() -> None:
    # In a unit, systemd ends it with its supervisor; here nobody else does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "bad-flag" in WORDS:
        print("usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: --no-such-flag", file=sys.stderr)
        sys.exit(2)
    if "no-model" in WORDS:
        print("(APIServer pid=1) Traceback (most recent call last):")
        print("(APIServer pid=1) huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '/srv/none'.")
        sys.exit(1)
    CONTROL.with_suffix(".env").write_text(json.dumps(dict(os.environ)))
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    time.sleep(float(WORDS.get("slow", 0)))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    server.daemon_threads = True
    if "exit-0-after" in WORDS:
        threading.Timer(float(WORDS["exit-0-after"]), lambda: os._exit(0)).start()
    print("Application startup complete.", flush=True)
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
