"""Run work in a daemon thread."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_daemon_thread(work: Callable[[], Result], *, name: str) -> Future[Result]:
    """Run work in a daemon thread, which does not keep the process alive as an executor's threads would.

    The returned future cannot be cancelled.
    """
    found: Future[Result] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # re-raised by `Future.result`
            found.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return found
