"""States by prefix: found by their name, bounded, the least recently used forgotten first."""

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.cache.prefix import StateCache


def test_the_least_recently_used_state_is_evicted() -> None:
    s = StateCache(2, 4)
    s.put((b"a", ()), 1)
    s.put((b"b", ()), 2)
    s.use((b"a", ()))
    s.put((b"c", ()), 3)
    assert [parent for parent, _ in s.snapshots] == [b"a", b"c"]


def test_the_first_state_of_a_name_stays() -> None:
    """Both are right, but in another batch the last bits may differ: who goes on sees one and the
    same."""
    s = StateCache(2, 4)
    s.put((b"a", ()), 1)
    s.put((b"a", ()), 2)
    assert s.use((b"a", ())) == 1 and len(s.snapshots) == 1


@given(
    st.integers(0, 4),
    st.lists(
        st.tuples(st.booleans(), st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=2))
    ),
)
def test_the_bound_holds(capacity: int, verbs: list[tuple[bool, str, list[int]]]) -> None:
    s, mirror = StateCache(capacity, 4), {}
    for put, parent, tail in verbs:
        name = parent.encode(), tuple(tail)
        if put:
            s.put(name, name)
            mirror[name] = mirror.pop(name, name)
            mirror = dict(list(mirror.items())[-capacity:]) if capacity else {}
        elif name in mirror:
            assert s.use(name) == name
            mirror[name] = mirror.pop(name)
        assert len(s.snapshots) <= capacity
        assert list(s.snapshots) == list(mirror)
