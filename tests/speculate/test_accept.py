"""The accept rule: nothing but samples is ever emitted."""

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.speculate import accept

ids = st.integers(0, 2)


@given(draft=st.lists(ids, max_size=6), data=st.data())
def test_only_samples_come_out(draft: list[int], data: st.DataObject) -> None:
    sampled = data.draw(st.lists(ids, min_size=len(draft) + 1, max_size=len(draft) + 1))
    out = accept(draft, sampled)
    assert 1 <= len(out) <= len(draft) + 1
    assert out == sampled[: len(out)]
    assert out[:-1] == draft[: len(out) - 1]
    assert len(out) == len(draft) + 1 or out[-1] != draft[len(out) - 1]
