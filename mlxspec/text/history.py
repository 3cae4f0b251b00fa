"""The generated tokens of past answers, so that the next turn's prompt repeats them exactly.

If a rendered conversation contains an answer of this server, its original tokens are used. Other
text, including an answer that the client changed, is encoded again. Text thread only.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from mlxspec.text.output_parser import Call

MAX_TOKENS = 1 << 20  # kept, of all answers together
MAX_TURNS = 1 << 12
MAX_CALLS = 1 << 10


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of an answer without its end token, and character positions in the text of its
    conversation: the start of the answer, and the start and the end of its end token."""

    start: int
    end: int
    stop: int
    ids: tuple[int, ...]


@dataclass(slots=True)
class History:
    """The most recently used answers, by the hash of the conversation up to their ends, and the
    most recently used calls, by id."""

    _turns: OrderedDict[bytes, Turn] = field(default_factory=OrderedDict)
    _calls: OrderedDict[str, Call] = field(default_factory=OrderedDict)

    def call(self, id: str) -> Call | None:
        """The call as the model wrote it; None for an unknown id. Clients rewrite arguments, and
        some add defaults."""
        call = self._calls.get(id)
        if call:
            self._calls.move_to_end(id)
        return call

    def keep_call(self, call: Call) -> None:
        self._calls[call.id] = call
        if len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)

    def keep_turn(self, before: str, after: str, ids: Sequence[int], end: str) -> None:
        """Keep an answer. `before` is the prompt's text, `after` the conversation's with the
        answer, `ids` the answer's tokens with the end token, whose text is `end`. Nothing is kept
        if the template renders the prompt differently before an answer."""
        at = after.rfind(end)
        stop = at + len(end)
        if not end or at < len(before) or not after.startswith(before):
            return
        if after[stop:].strip():
            return
        key = blake2b(after[:stop].encode(), digest_size=16).digest()
        self._turns[key] = Turn(len(before), at, stop, tuple(ids[:-1]))
        self._turns.move_to_end(key)
        tokens = sum(len(turn.ids) for turn in self._turns.values())
        while tokens > MAX_TOKENS or len(self._turns) > MAX_TURNS:
            _, oldest = self._turns.popitem(last=False)
            tokens -= len(oldest.ids)

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a conversation's text, with the generated ones of its answers. Text after an
        answer is encoded with the end token in front: some tokenizers encode the beginning of a
        text differently."""
        ids: list[int] = []
        digest = blake2b(digest_size=16)
        at, encoded = 0, 0
        for stop in sorted({turn.stop for turn in self._turns.values()}):
            digest.update(text[at:stop].encode())
            at, key = stop, digest.digest()
            turn = self._turns.get(key)
            if turn and turn.start >= encoded:
                self._turns.move_to_end(key)
                ids += encode(text[encoded : turn.start])
                ids += turn.ids
                encoded = turn.end
        return ids + encode(text[encoded:])
