"""The index: a key is known while anything holds it; what was used least recently goes first."""

import numpy as np
import pytest

from mlxspec.cache.runfile import Run
from mlxspec.cache.runindex import File, Index, Waiting

A, B, C, D = (bytes([i]) * 16 for i in range(4))


def waiting(*keys: bytes) -> Waiting:
    return Waiting(Run(keys, {"x": np.zeros(1)}, {}), b"", 10, 1)


def test_a_key_is_known_while_a_file_or_a_waiting_run_holds_it() -> None:
    index = Index()
    index.add("1", File(10, 1, (A, B)))
    index.enqueue("2", waiting(B, C))
    index.check()
    assert index.names([A, B, C, D]) == ["1", "2"] and D not in index
    assert index.on_disk([A, B]) and not index.on_disk([B, C])
    index.forget("1")
    index.check()
    assert index.names([A, B, C]) == ["2"] and A not in index
    index.add("2", File(20, 1, (B, C)))
    index.settle("2")
    index.check()
    assert index.names([B, C]) == ["2"] and index.on_disk([B, C]) and index.bytes == 20


def test_a_longer_run_replaces_a_file_or_leaves_it() -> None:
    for written in (True, False):
        index = Index()
        index.add("1", File(10, 1, (B,)))
        index.enqueue("1", waiting(A, B))
        index.check()
        if written:
            index.add("1", File(20, 1, (A, B)))
        index.settle("1")
        index.check()
        assert (A in index, B in index) == (written, True)
        index.forget("1")
        index.check()
        assert B not in index and index.bytes == index.waiting_bytes == 0


def test_the_least_recently_used_goes_first_and_of_a_chain_the_tail() -> None:
    index = Index()
    for i, name in enumerate("abcdef"):
        index.add(name, File(10, i, ()))
    assert index.evict(60) == [] and index.evict(50) == ["a"]
    index.touch(["b", "c", "d"])  # after the order was sorted
    index.add("g", File(10, 7, ()))
    assert index.evict(30) == ["e", "f", "g"] and index.evict(10) == ["d", "c"]
    assert index.evict(-5) == ["b"] and index.bytes == 0
    index.check()


def test_what_is_found_replaces_what_was_known() -> None:
    index = Index()
    index.add("1", File(10, 50, (A,)))
    index.add("2", File(10, 1, (B,)))
    index.enqueue("2", waiting(C, B))
    index.replace({"1": File(30, 2, (A, D))})
    index.check()
    assert (
        A in index and D in index and B in index and index.bytes == 30
    )  # 2 waits to be written again
    assert index.files["1"].used == 50  # touched here, which the disk does not show yet


def test_check_sees_what_is_wrong() -> None:
    index = Index()
    index.add("1", File(10, 1, (A,)))
    index.files["1"].keys = (B,)
    with pytest.raises(AssertionError, match="differ"):
        index.check()
