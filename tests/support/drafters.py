"""Drafters for tests: the real ones over tiny models, with costs under which a row costs next to
nothing."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlxspec.engine.engine import Engine
from mlxspec.model.batch import Step
from mlxspec.model.runner import Runner
from mlxspec.model.trunk import decoder_layers, embedding_and_lm_head
from mlxspec.sequences import Plan, Seq, Span
from mlxspec.speculate.chain import DraftCosts, deepest_first
from mlxspec.speculate.controller import Costs
from mlxspec.speculate.draft_model import DraftModel
from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.block import Block
from mlxspec.speculate.heads.block_pass import BlockPass
from mlxspec.speculate.heads.chained import ChainedPass, ParallelPass
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.eagle import Eagle3
from mlxspec.speculate.heads.files import find_head
from mlxspec.speculate.heads.medusa import Medusa, MedusaPass
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.mtp import MTP
from mlxspec.speculate.heads.tensors import Vocabulary
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import Request
from tests.heads.assistant import random_assistant
from tests.heads.packagings import SIDECAR
from tests.support import tiny

KINDS = ["lookup", "suffix", "model", "chain"]
HEADS = ["mtp", "told"]  # with random weights, and a KnownHead
OTHER_HEADS = ["dflash", "eagle3", "dspark", "peagle", "medusa"]  # with random weights
OWN_HEADS = ["assistant"]  # for one kind of model, with random weights
ALL_HEADS = [*HEADS, *OTHER_HEADS, *OWN_HEADS, tiny.TRAINED]  # the last for tiny.TRAINED

Answers = Callable[[Request, int], list[int]]


class Silent:
    """A source with nothing to say, in the place of one that a test leaves out."""

    def __init__(self, *_: Any) -> None:
        self.capacity = 0

    def add(self, *_: Any) -> None: ...
    def advance(self, *_: Any) -> None: ...
    def index(self, *_: Any) -> int:
        return 0

    def feed(self, *_: Any) -> int:
        return 0

    def propose(self, *_: Any) -> None: ...


class WithoutLookup(NgramDrafter):
    def begin(self, seq: Seq) -> None:
        self._live[seq] = Silent()  # type: ignore[assignment]


def partly_wrong(answer: list[int]) -> mx.array:
    """An answer with every seventh token wrong, and more after its end: drafts may reach beyond."""
    told = [(t + (i % 7 == 5)) % tiny.VOCAB for i, t in enumerate(answer)]
    return mx.array(told + [0 for _ in range(64)])


class KnownAnswers:
    """In the place of a small model's runner: it was told the answers, and gets every seventh token
    wrong. For targets that no model in the rows layout is like."""

    def __init__(self, answers: Answers, block_size: int) -> None:
        self.answers, self.view = answers, SimpleNamespace(block_size=block_size)
        self.caches: list[Any] = []
        self.engine: Engine | None = None  # the target's, once it is attached

    def of(self, e: Span) -> Seq:
        """The sequence that a row is of."""
        assert self.engine
        return next(seq for seq in self.engine.scheduler.running if seq.state is e.state)

    def forward_rows(self, plan: list[Span], ids: mx.array, shift: mx.array | None) -> mx.array:
        assert ids.size == sum(e.rows for e in plan)
        next_ = []
        for n, e in enumerate(plan):
            if e.samples:
                told = partly_wrong(self.answers(self.of(e).request, e.state.index))
                at = mx.array(e.end - e.state.prompt_len)
                next_.append(told[at if shift is None else at + shift[n]])
        if not next_:
            return mx.zeros((0, tiny.VOCAB))
        return 1e4 * (mx.arange(tiny.VOCAB) == mx.stack(next_)[:, None])


def random_head(model: Any, kind: str = "mtp") -> HeadModel:
    """A head for a model. An MTP head's layer is of the model's own kind with full attention. For
    tiny.TRAINED, the one that was trained with it."""
    if kind == tiny.TRAINED:
        head = load_head(find_head(SIDECAR), model)
        assert head is not None and read_weights(head)
        return head
    if kind == "assistant":
        return random_assistant(model)
    mx.random.seed(5)
    if kind in ("dflash", "dspark"):
        return _random_block(model, kind)
    if kind == "medusa":
        return _random_medusa(model)
    return _random_mtp(model) if kind == "mtp" else _random_eagle(model, kind)


def _random_mtp(model: Any) -> HeadModel:
    args = getattr(model, "language_model", model).args
    kind = next(type(x) for x in decoder_layers(model) if not getattr(x, "is_linear", False))
    place = [args.full_attention_interval - 1] if hasattr(args, "full_attention_interval") else []
    head = MTP([kind(args, *place)], args.hidden_size, args.rms_norm_eps)
    own = embedding_and_lm_head(model)
    return HeadModel("mtp", ChainedPass, _sharpened(head), *own, args.hidden_size)


def _sharpened(head: Any) -> Any:
    """With larger weights than as initialised, so that what it reads changes what it drafts."""
    head.update(tree_map(lambda x: x * 2.5 if x.ndim > 1 else x, head.parameters()))
    mx.eval(head.parameters())
    head.eval()
    return head


def _head_config(model: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Of an EAGLE-3 or block head with one layer, and the layers of the model that it reads."""
    embed, _ = embedding_and_lm_head(model)
    config = dict(
        hidden_size=embed(mx.array([0])).shape[-1],
        num_hidden_layers=1,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        vocab_size=tiny.VOCAB,
        max_position_embeddings=512,
        rope_theta=1000.0,
        tie_word_embeddings=False,
    )
    return config, tuple(range(len(decoder_layers(model))))[-2:]


def _random_medusa(model: Any) -> HeadModel:
    own = embedding_and_lm_head(model)
    size = own[0](mx.array([0])).shape[-1]
    head = _sharpened(Medusa(3, 2, size, tiny.VOCAB))
    return HeadModel("medusa", MedusaPass, head, *own, size, kv_layers=0, depth=3)


def _random_eagle(model: Any, kind: str) -> HeadModel:
    """With a reduced vocabulary: every second token."""
    config, taps = _head_config(model)
    embed, lm_head = embedding_and_lm_head(model)
    head = Eagle3(config | {"model_type": "llama"}, len(taps), config["hidden_size"])
    drafts = ChainedPass
    if kind == "peagle":
        drafts, head.mask = ParallelPass, 3
        head.mask_hidden = mx.random.normal((1, len(taps) * config["hidden_size"]))
    ids = mx.arange(0, tiny.VOCAB, 2)
    normed, vocabulary = _sharpened(head).normed, Vocabulary(ids, tiny.VOCAB)

    def logits(out: mx.array) -> mx.array:
        return vocabulary(lm_head(normed(out))[:, ids])

    width = len(taps) * config["hidden_size"]
    return HeadModel(kind, drafts, head, embed, logits, width, taps, head.prepare)


def _random_block(model: Any, kind: str) -> HeadModel:
    config, taps = _head_config(model)
    config |= {"model_type": "qwen3", "markov_rank": 16 if kind == "dspark" else 0}
    config |= {"mask_token_id": 0}
    size = config["hidden_size"]
    head = _sharpened(Block(config, len(taps), size))
    own = embedding_and_lm_head(model)
    return HeadModel(
        kind, BlockPass, head, *own, width=len(taps) * size, taps=taps, slot_offset=0, depth=6
    )


class KnownHead(HeadDrafter):
    """A head that was told the answers, and gets every seventh token wrong."""

    def __init__(self, head: HeadModel, runner: Runner, answers: Answers) -> None:
        super().__init__(replace(head, lm_head=self._logits), runner)
        self.answers = answers

    def draft(self, plan: Plan, previous: Step | None) -> None:
        self.drafting, self.passes, self.shift = deepest_first(self.chosen(plan)), 0, None
        if any(e.inflight_drafts for e in self.drafting):
            assert previous is not None
            self.shift = previous.shift_of(self.drafting)
        super().draft(plan, previous)

    def _logits(self, hidden: mx.array) -> mx.array:
        next_ = []
        for n, e in enumerate(self.drafting[: len(hidden)]):
            told = partly_wrong(self.answers(e.seq.request, e.seq.index))
            at = mx.array(e.start + e.count + self.passes - e.seq.prompt_len)
            next_.append(told[at if self.shift is None else at + self.shift[n]])
        self.passes += 1
        return 1e4 * (mx.arange(tiny.VOCAB) == mx.stack(next_)[:, None])


def attach_head(
    e: Engine,
    answers: Answers | None = None,
    depth: int = 0,
    row: float = 1e-6,
    kind: str = "mtp",
) -> Any:
    """Give the engine a head, as the program does; with `answers` a KnownHead. `depth` tokens are
    drafted always, 0: what pays where a row costs `row` steps."""
    head = random_head(e.runner.model, kind)
    told = answers and head.slot_offset
    drafter = KnownHead(head, e.runner, answers) if told else HeadDrafter(head, e.runner)
    e.scheduler.kv.recompute_last = (
        head.slot_offset * head.kv_layers > 0 and e.scheduler.kv.states is None
    )
    _propose(e, [drafter], row, depth)
    return drafter


def _propose(e: Engine, drafters: list[Any], row: float, depth: int = 0) -> Proposer:
    """Drafts as the program limits them."""
    e.proposer = Proposer(costs(row), drafters, depth, padded=e.runner.layout != "rows")
    return e.proposer


def costs(row: float = 1e-6) -> Costs:
    return Costs((64, 128), (1, 32), ((1.0, 1.0 + 31 * row), (1.0, 1.0 + 31 * row)))


def _off(x: mx.array, noise: float) -> mx.array:
    return (x * (1 + noise * mx.random.normal(x.shape))).astype(x.dtype)


def like(model: Any, kind: str, noise: float) -> Any:
    """A model that mostly agrees with `model`: the same weights, each off by `noise`."""
    small = tiny.model(kind)
    mx.random.seed(9)
    small.update(
        tree_map(
            lambda x: _off(x, noise) if x.ndim > 1 and x.dtype != mx.uint32 else x,
            small.parameters(),
        )
    )
    mx.eval(small.parameters())
    return small


def attach(e: Engine, kind: str, small: Any = None, row: float = 1e-6) -> Proposer:
    """Give the engine a proposer with the sources that `kind` names."""
    model = None
    if kind in ("model", "chain"):
        own = small
        if isinstance(small, KnownAnswers):
            small.engine = e
        else:
            own = Runner(small, "rows", e.runner.view.block_size, e.scheduler.pool.size)
        model = HeadDrafter(DraftModel(own, tiny.VOCAB).head(), e.runner)
        model.costs = DraftCosts(row)
    copying = NgramDrafter() if kind in ("lookup", "chain") else WithoutLookup()
    if kind not in ("suffix", "chain"):
        copying.corpus = Silent()  # type: ignore[assignment]
    drafters: list[Any] = [copying, model] if model else [copying]
    return _propose(e, drafters, row)


def copies(proposer: Proposer) -> Any:
    """The copying drafter of a proposer."""
    return proposer.drafters[0]


def small_model(proposer: Proposer) -> Any:
    """The draft model of a proposer, if it has one."""
    return proposer.drafters[1] if len(proposer.drafters) > 1 else None
