"""Turns token ids into the text that a client sees.

The text depends on the tokens alone, never on how they were grouped. No character is shown in
pieces, nothing of a stop string is shown, and what might become one is held back.
"""

import codecs
import re
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
    _byte_decoder,
)

BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
NEUTRAL = "a"  # stands before a token whose text depends on what is before it


def held_back(text: str, strings: Collection[str]) -> int:
    """Length in characters of the longest end of the text with which one of the strings begins."""
    longest = max(map(len, strings), default=1)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(string.startswith(text[-n:]) for string in strings):
            return n
    return 0


@dataclass(slots=True)
class StopStrings:
    """Looks for stop strings in a text that comes in pieces, and ends it before the one that is
    whole first: `stopped`. What may become one is held back, `pending`."""

    strings: Sequence[str] = ()
    pending: str = ""
    stopped: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        self.pending += text
        found = []
        for stop in self.strings:
            if (at := self.pending.find(stop)) >= 0:
                found.append((at + len(stop), at, stop))
        if not found:
            return self.flush(len(self.pending) - held_back(self.pending, self.strings))
        _, at, self.stopped = min(found)
        return self.flush(at)

    def flush(self, n: int | None = None) -> str:
        """Up to `n` characters of what is held back."""
        text, self.pending = self.pending[:n], self.pending[len(self.pending[:n]) :]
        return text


@dataclass
class Detokenizer:
    """The detokenizer of one choice. `stop` are stop strings; `stop_tokens` end the text and are
    never shown. An answer does not begin with the space that its first token may carry; with
    `prompt_text_continues` the text goes on from the prompt's and keeps it.

    `shown` counts the characters that were shown. `count` is the number of tokens read, including a
    stop token and the token that completed a stop string. `released` has, for each token of whose
    text something was shown, where its text begins: its log-probability may be sent. The caller may
    empty it. Nothing is read after the end.
    """

    tokenizer: TokenizerWrapper
    stop: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    prompt_text_continues: bool = False

    def __post_init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        trims = getattr(self.tokenizer.detokenizer, "trim_space", True)
        spelled = is_byte_level(self.tokenizer)  # whose first space is the answer's
        self._trim = trims and not spelled and not self.prompt_text_continues
        self.stops = StopStrings(self.stop)
        self.shown = 0  # characters
        self._starts: deque[int] = deque()  # where the text of each unreleased token begins
        self.ended = False
        self.count = 0
        self.released: list[int] = []

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that is certain after these tokens."""
        shown = []
        for token in tokens:
            if self.ended:
                break
            self.count += 1
            if token in self.stop_tokens:
                self.ended = True
                break
            self._starts.append(self.shown + len(self.stops.pending))
            shown.append(self._take(self._utf8.decode(token_bytes(self.tokenizer, token))))
        return "".join(shown)

    def finish(self) -> str:
        """The text that was held back; call it once, after the last token."""
        self.ended = True
        if self.stopped is not None:
            return ""
        text = self._take(self._utf8.decode(b"", True))
        if self.stopped is None:
            text += self._show(self.stops.flush())
            self.released += self._starts
        return text

    @property
    def stopped(self) -> str | None:
        """The stop string that was met."""
        return self.stops.stopped

    def _take(self, text: str) -> str:
        """Adds text; returns what can be shown now."""
        if self._trim and text:
            text, self._trim = text.removeprefix(" "), False
        shown = self.stops.feed(text)
        self.ended = self.ended or self.stopped is not None
        return self._show(shown)

    def _show(self, text: str) -> str:
        self.shown += len(text)
        while self._starts and self._starts[0] < self.shown:
            self.released.append(self._starts.popleft())
        return text


@lru_cache(16)
def is_byte_level(tokenizer: TokenizerWrapper) -> bool:
    """Whether tokens are spelled in GPT-2's byte alphabet, whatever decoder the files name: some
    conversions have SentencePiece's."""
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    spells = "ByteLevel" in str(getattr(backend, "pre_tokenizer", ""))
    return spells or isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)


@lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: TokenizerWrapper, token: int) -> bytes:
    """The UTF-8 bytes that a token stands for, also of a part of a character; none for an unknown
    id."""
    known = token < len(tokenizer)
    piece: str | None = tokenizer.convert_ids_to_tokens(token) if known else None
    if piece is None:  # a model's vocabulary may be padded with ids that mean nothing
        return b""
    if byte := BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    if not is_byte_level(tokenizer):
        if isinstance(tokenizer.detokenizer, SPMStreamingDetokenizer):
            return piece.replace("▁", " ").encode()
        before = tokenizer.encode(NEUTRAL, add_special_tokens=False)
        text = str(tokenizer.decode([*before, token]))
        return text.removeprefix(tokenizer.decode(before)).encode()
    if token in tokenizer.added_tokens_decoder:  # spelled out
        return piece.encode()
    alphabet = _byte_decoder()  # GPT-2's byte alphabet: a character for each byte
    made = bytearray()
    for char in piece:
        made += bytes([alphabet[char]]) if char in alphabet else char.encode()
    return bytes(made)
