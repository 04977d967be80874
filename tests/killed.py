"""pyinfra, killed where a test wants it: what a lost laptop does to a run.

`python -m tests.killed NAME ARGUMENT...` ends with SIGKILL when the operation NAME is about to start; with `NAME#3`, when its third
command is. Where there is none the run goes to its end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.state import State
from pyinfra_cli.main import main

wanted, _, number = sys.argv[1].partition("#")
sys.argv = ["pyinfra", *sys.argv[2:]]
begun = 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def names(state: State, op_hash: str) -> set[str]:
    """Names of an operation, without those of its deploys."""
    return {name.split(" | ")[-1] for name in state.get_op_meta(op_hash).names}


def trigger_or_die(self: State, method_name: str, *args: Any, **kwargs: Any) -> None:
    if method_name == "operation_start" and not number and wanted in names(self, args[0]):
        die()
    for handler in self.callback_handlers:
        getattr(handler, method_name)(self, *args, **kwargs)


def counted(execute: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, state: State, host: Any, *args: Any) -> Any:
        global begun
        if number and host.executing_op_hash and wanted in names(state, host.executing_op_hash):
            begun += 1
            if begun == int(number):
                die()
        return execute(self, state, host, *args)

    return run


State.trigger_callbacks = trigger_or_die  # type: ignore[method-assign,assignment]
StringCommand.execute = counted(StringCommand.execute)  # type: ignore[method-assign]
FunctionCommand.execute = counted(FunctionCommand.execute)  # type: ignore[method-assign]
if __name__ == "__main__":
    main()
