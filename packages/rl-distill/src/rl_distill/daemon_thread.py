"""Work in a thread that ends with the process."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_daemon_thread(work: Callable[[], Result], *, name: str) -> Future[Result]:
    """Begin work in a thread of its own that ends with the process; an executor's would be waited for then.

    What it gives cannot be cancelled.
    """
    found: Future[Result] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            found.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return found
