"""What MLX holds, counted while other threads are at work."""

import sys
import threading

import mlx.core as mx

from mlxspec.model import meter


def test_a_count_disturbs_no_other_thread() -> None:
    """A tuple that is being built must not be seen: CPython would raise SystemError in the thread that does."""
    done, errors, built = threading.Event(), list[BaseException](), [0]

    def build() -> None:
        while not done.is_set():
            try:
                built[0] += len(tuple(i for i in range(3000)))
            except SystemError as error:
                errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(20):
            meter.arrays()
        assert sys.getswitchinterval() == 1e-5
    finally:
        sys.setswitchinterval(before)
        done.set()
        thread.join()
    assert built[0] and not errors


def test_arrays_are_counted() -> None:
    before = meter.arrays()
    held = [mx.zeros((1,)) for _ in range(50)]
    assert meter.arrays() == before + 50
    held.clear()
    assert meter.arrays() == before
