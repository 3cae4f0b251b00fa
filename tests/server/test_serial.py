"""Work in order on one thread, which ends when nobody needs it, and keeps nothing that nobody waits
for."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from mlxspec.server import serial
from mlxspec.server.serial import Serial


def test_in_order_and_each_told_what_it_raised() -> None:
    one, order = Serial("t"), list[int]()
    futures = [one.submit(lambda n=n: order.append(n)) for n in range(50)]  # type: ignore[misc]
    wrong = one.submit(lambda: 1 // 0)
    assert one.submit(lambda: threading.current_thread().name).result(5) == "t"
    with pytest.raises(ZeroDivisionError):
        wrong.result(5)
    assert [f.result(5) for f in futures] == [None] * 50 and order == list(range(50))


def test_what_is_cancelled_in_time_is_neither_done_nor_kept() -> None:
    one, gate, done = Serial("t"), threading.Event(), list[str]()
    held = one.submit(gate.wait)
    while not one.at_work:
        time.sleep(0.001)
    work = lambda: done.append("never")  # noqa: E731
    gone, seen = one.submit(work), weakref.ref(work)
    last = one.submit(lambda: done.append("last"))
    assert len(one.waiting) == 2 and gone.cancel() and len(one.waiting) == 1
    del work
    gc.collect()
    assert seen() is None and not held.cancel()
    gate.set()
    last.result(5)
    assert done == ["last"]


def test_its_thread_ends_where_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial, "REST_S", 0.05)
    one = Serial("rests")
    assert one.submit(lambda: 1).result(5) == 1
    end = time.monotonic() + 5
    while any(t.name == "rests" for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert one.submit(lambda: 2).result(5) == 2 and not one.waiting
    seen = weakref.ref(one)
    del one
    while seen() is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
        gc.collect()


def test_a_thread_at_work_keeps_no_process() -> None:
    text = "import time; from mlxspec.server import serial; one = serial.Serial('t')"
    text += "; one.submit(lambda: time.sleep(60))"
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", text + "; x = list(iter(serial.busy, True))"], check=True, timeout=30
    )
    assert time.monotonic() - began < 20
