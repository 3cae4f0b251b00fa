"""One thread that does work in order.

Rule: what is taken back while it waits leaves nothing behind, and a thread that is busy keeps no
process that is to end. An executor of the standard library keeps both.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

REST_S = 10.0
ALL: "WeakSet[Serial]" = WeakSet()


def busy() -> bool:
    """Whether a thread of this process is at work, which would outlast the interpreter."""
    return any(serial.at_work for serial in ALL)


class Serial:
    """`waiting` is the work that has not begun. A thread is there while there is some, and REST_S
    longer."""

    def __init__(self, name: str) -> None:
        self.waiting: dict[Future[Any], Callable[[], Any]] = {}
        self.at_work = False
        self._name, self._some = name, threading.Condition()
        self._thread: threading.Thread | None = None
        ALL.add(self)

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Have `work` done after all that waits, unless its future is cancelled before."""
        future: Future[T] = Future()
        future.add_done_callback(self._forget)
        with self._some:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # not before: a machine may have no thread to give
            self.waiting[future] = work
            self._some.notify()
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._some:
            self.waiting.pop(future, None)

    def _run(self) -> None:
        while True:
            with self._some:
                self.at_work = False
                while not self.waiting:
                    if not self._some.wait(REST_S) and not self.waiting:
                        self._thread = (
                            None  # the next work begins another; else it would keep all this
                        )
                        return
                future = next(iter(self.waiting))
                work, self.at_work = self.waiting.pop(future), True
            _do(work, future)
            del work, future  # or they would be held while it waits


def _do(work: Callable[[], T], future: "Future[T]") -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(work())
    except BaseException as error:  # whoever waits is told
        future.set_exception(error)
    finally:
        del work, future  # or the error would hold them, by its traceback, and they it
