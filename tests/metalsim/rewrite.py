"""What Metal's language allows and C++ does not, rewritten token by token.

Rule: meaning and line numbers stay; a source that needs nothing comes back as it was.
"""

import re
from functools import lru_cache
from itertools import pairwise

TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<name>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)|(?P<directive>\#(?:\\\n|[^\n])*)
    |(?P<mark>.)""",
    re.S | re.X,
)
VECTOR = (
    r"(?:metal::)?(?:vec\s*<[^;]*>|(?:bool|u?char|u?short|u?int|u?long|half|float|bfloat)[234])"
)
ALIAS = re.compile(rf"\busing\s+(\w+)\s*=\s*{VECTOR}\s*;|\btypedef\s+{VECTOR}\s+(\w+)\s*;")
REAL = r"(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+"
REAL_LITERAL, REAL_IN_DIRECTIVE = re.compile(REAL), re.compile(rf"(?<![\w.])(?:{REAL})(?![\w.])")
INSTANCE = re.compile(r"(?m)^([ \t]*)template\s*\[\[host_name\([^;]*?;")
PRAGMA = re.compile(r"(?m)^[ \t]*#\s*pragma\s+METAL\b[^\n]*")


@lru_cache(256)
def rewrite(source: str) -> str:
    """- A literal without a suffix is a float: Metal has no double.
    - `threadgroup T x[n];`, a variable and no pointer, becomes static in the section of threadgroup
    memory.
    - A parameter `device T x[n]` becomes a pointer, which the array is.
    - vec<T, N>(...) and aliases of vectors, used as functions, go to metal::msl_make.
    - Explicit instances of kernels and pragmas of Metal go."""
    tokens = Tokens(re.sub(r"\[\[\s*threadgroup\s*\(", "[[msim_threadgroup(", source))
    aliases = {one or other for one, other in ALIAS.findall(source)}
    for i in tokens.meant:
        kind, text = tokens.kinds[i], tokens.texts[i]
        if kind == "number" and REAL_LITERAL.fullmatch(text):
            tokens.out[i] = text + "f"
        elif kind == "directive":
            tokens.out[i] = REAL_IN_DIRECTIVE.sub(lambda match: match.group() + "f", text)
        elif kind == "name":
            name(tokens, i, aliases)
    kept = INSTANCE.sub(lambda match: "\n" * match.group().count("\n"), "".join(tokens.out))
    return PRAGMA.sub("", kept)


class Tokens:
    """meant: the tokens that are neither space nor comment."""

    def __init__(self, source: str) -> None:
        found = [(match.lastgroup or "", match.group()) for match in TOKEN.finditer(source)]
        self.kinds, self.texts = [kind for kind, _ in found], [text for _, text in found]
        self.meant = [i for i, kind in enumerate(self.kinds) if kind not in ("space", "comment")]
        self.after = dict(pairwise(self.meant))
        self.before = {b: a for a, b in self.after.items()}
        self.out = list(self.texts)

    def next(self, i: int) -> str:
        return self.texts[self.after[i]] if i in self.after else ""

    def previous(self, i: int) -> str:
        """A directive ends a statement, as the start of the text does."""
        if i not in self.before or self.kinds[self.before[i]] == "directive":
            return ";"
        return self.texts[self.before[i]]

    def closing(self, i: int) -> int | None:
        """Where the bracket that opens at i, "<" or "[", closes."""
        opened, other, depth = self.texts[i], {"<": ">", "[": "]"}[self.texts[i]], 0
        while True:
            depth += (self.texts[i] == opened) - (self.texts[i] == other)
            if not depth:
                return i
            if self.texts[i] in ";{}" or i not in self.after:
                return None
            i = self.after[i]


def name(tokens: Tokens, i: int, aliases: set[str]) -> None:
    text, before = tokens.texts[i], tokens.previous(i)
    if text == "threadgroup" and before in (";", "{", "}", ")", ":"):
        if is_variable(tokens, i):
            tokens.out[i] = "MSIM_TG_STATIC threadgroup"
    elif text in ("device", "threadgroup", "constant") and before in ("(", ",", "const"):
        if before != "const" or tokens.previous(tokens.before[i]) in ("(", ","):
            array_parameter(tokens, i)
    elif text == "vec" and tokens.next(i) == "<":
        end = tokens.closing(tokens.after[i])
        if end is not None and tokens.next(end) == "(":
            tokens.out[i], tokens.out[end] = "metal::msl_make<vec", ">>"
    elif text in aliases and tokens.next(i) == "(" and before not in ("using", "typedef", ">"):
        tokens.out[i] = f"metal::msl_make<{text}>"


def is_variable(tokens: Tokens, i: int) -> bool:
    """Does `threadgroup` at i begin a variable's declaration, not a pointer's or a function's?"""
    angles = brackets = 0
    while i in tokens.after:
        i = tokens.after[i]
        text = tokens.texts[i]
        angles = max(0, angles + (text == "<") - (text == ">"))
        brackets += (text == "[") - (text == "]")
        if text in ("*", "&", "(") and not angles and not brackets:
            return False
        if text in (";", "=", "{"):
            return True
    return True


def array_parameter(tokens: Tokens, i: int) -> None:
    """`AS T name[N]` becomes `AS T* name`, and `AS T name[N][M]` `AS T (*name)[M]`."""
    angles, last, opens = 0, None, None
    while i in tokens.after and opens is None:
        i = tokens.after[i]
        text = tokens.texts[i]
        angles = max(0, angles + (text == "<") - (text == ">"))
        if angles or text == ">":
            continue
        if text == "[":
            opens = i
        elif text in ("(", ")", "*", "&", ";", ",", "=", "{", "}"):
            return
        elif tokens.kinds[i] == "name":
            last = i
    end = tokens.closing(opens) if opens is not None else None
    if last is None or opens is None or end is None or tokens.next(end) not in (",", ")", "["):
        return
    for at in range(opens, end + 1):
        tokens.out[at] = ""
    tokens.out[last] = (
        f"(*{tokens.texts[last]})" if tokens.next(end) == "[" else f"*{tokens.texts[last]}"
    )
