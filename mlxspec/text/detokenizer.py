"""Turns token ids into the text that a client sees.

The text depends only on the tokens, never on how they were grouped. Incomplete characters and stop
strings are never shown, and text that may become a stop string is held back.
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
NEUTRAL = "a"  # goes before a token whose text depends on the token before


def partial_length(text: str, strings: Collection[str]) -> int:
    """Length in characters of the longest suffix of the text that begins one of the strings."""
    longest = max(map(len, strings), default=1)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(string.startswith(text[-n:]) for string in strings):
            return n
    return 0


@dataclass(slots=True)
class StopStrings:
    """Finds stop strings in a text that comes in pieces, and truncates it before the first complete
    one, `stopped`. `pending` is the text held back because it may become one."""

    strings: Sequence[str] = ()
    pending: str = ""
    stopped: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        self.pending += text
        matches = []
        for stop in self.strings:
            if (at := self.pending.find(stop)) >= 0:
                matches.append((at + len(stop), at, stop))
        if not matches:
            return self.flush(len(self.pending) - partial_length(self.pending, self.strings))
        _, at, self.stopped = min(matches)
        return self.flush(at)

    def flush(self, n: int | None = None) -> str:
        """Up to `n` characters of what is held back."""
        text, self.pending = self.pending[:n], self.pending[len(self.pending[:n]) :]
        return text


@dataclass
class Detokenizer:
    """The detokenizer of one choice. `stop` are stop strings; `stop_tokens` end the text and are
    never shown. The leading space of an answer's first token is dropped, unless the text continues
    the prompt's (`prompt_text_continues`).

    `shown` counts the characters shown. `count` is the number of tokens read, including a stop
    token and the token that completed a stop string. `released` has the start of the text of each
    token that was shown at least in part, so that its log-probability may be sent; the caller may
    empty it. Tokens after the end are ignored.
    """

    tokenizer: TokenizerWrapper
    stop: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    prompt_text_continues: bool = False

    def __post_init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        trims = getattr(self.tokenizer.detokenizer, "trim_space", True)
        byte_level = is_byte_level(self.tokenizer)  # its first space belongs to the answer
        self._trim = trims and not byte_level and not self.prompt_text_continues
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
            shown.append(self._append(self._utf8.decode(token_bytes(self.tokenizer, token))))
        return "".join(shown)

    def finish(self) -> str:
        """The text that was held back; call it once, after the last token."""
        self.ended = True
        if self.stopped is not None:
            return ""
        text = self._append(self._utf8.decode(b"", True))
        if self.stopped is None:
            text += self._show(self.stops.flush())
            self.released += self._starts
        return text

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None if there was none."""
        return self.stops.stopped

    def _append(self, text: str) -> str:
        """Append text; returns what can be shown now."""
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
    conversions name SentencePiece's."""
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    byte_level = "ByteLevel" in str(getattr(backend, "pre_tokenizer", ""))
    return byte_level or isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)


@lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: TokenizerWrapper, token: int) -> bytes:
    """The UTF-8 bytes of a token, which may be part of a character; empty for an unknown id."""
    in_vocabulary = token < len(tokenizer)
    piece: str | None = tokenizer.convert_ids_to_tokens(token) if in_vocabulary else None
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
    data = bytearray()
    for char in piece:
        data += bytes([alphabet[char]]) if char in alphabet else char.encode()
    return bytes(data)
