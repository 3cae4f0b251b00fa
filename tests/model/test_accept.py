"""The accept rule: a drafted token stands while it equals the sample of the row before it."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels.reference import count_accepted
from mlxspec.model.sampler import drafts_of, sampled_row_specs
from mlxspec.sequences import Draft, Entry, Seq
from mlxspec.types import Request
from tests.support.examples import examples
from tests.support.spans import entry

ids = st.integers(0, 2)  # so few that drafts are often right


@st.composite
def entries(draw: st.DrawFn) -> tuple[Entry, list[int], list[int]]:
    """An entry, its input tokens and the samples of its last rows; some sample nothing."""
    samples = draw(st.booleans())
    draft = draw(st.lists(ids, max_size=6)) if samples else []
    count = draw(st.integers(1, 3))
    seq = Seq(Request("r", (0,) * 9, 99))
    inputs = [draw(ids) for _ in range(count)] + draft
    sampled = [draw(ids) for _ in range(len(draft) + 1)] if samples else []
    return entry(seq, 0, count, samples, draft=Draft(draft)), inputs, sampled


def stands(draft: list[int], sampled: list[int]) -> int:
    kept = 0
    while kept < len(draft) and draft[kept] == sampled[kept]:
        kept += 1
    return kept


@settings(max_examples=examples(200))
@given(
    st.lists(entries(), min_size=1, max_size=5).filter(lambda es: any(e.samples for e, _, _ in es))
)
def test_equals_the_rule_written_down(some: list[tuple[Entry, list[int], list[int]]]) -> None:
    plan = [e for e, _, _ in some]
    tokens = mx.array([t for _, _, sampled in some for t in sampled], mx.int32)
    inputs = mx.array([t for _, row, _ in some for t in row], mx.int32)
    drafts = drafts_of(sampled_row_specs(plan))
    if not drafts:
        return  # nobody asks where nothing was drafted
    kept = np.array(count_accepted(tokens, inputs, drafts)).tolist()
    assert kept == [stands(e.draft.tokens, sampled) for e, _, sampled in some if e.samples]
    for k, (e, _, sampled) in zip(kept, [s for s in some if s[0].samples], strict=True):
        out = sampled[: k + 1]
        assert out[:-1] == e.draft.tokens[:k]
        assert k == e.draft.size or out[-1] != e.draft.tokens[k]
