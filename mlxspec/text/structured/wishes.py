"""What a message asks for by a number: "write 500 zeros", "a 16x16 matrix". The answer may
repeat something that often, which would be a loop otherwise.

A number counts after a few words only, such as "write" or "of", and beside a thing or in a sentence
that asks for something; the name of a room, a price, a year, a port or an address does not.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

MAX_ASKED = 8000  # tokens of what it asks for
CELL = 8  # tokens, the most of each cell of a shape
MAX_CELLS = 1 << 14  # of a shape; what has more is a resolution
YEARS = range(1901, 2048)  # which are no number of repetitions, but for 2000
MAX_WISH = 1000  # characters of a message; of a longer one only its ends are read
NAMED = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
WORDS = {word: i if i < 20 else 10 * i - 180 for i, word in enumerate(NAMED.split(), 1)}
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "k": 1000, "million": 1_000_000}
TIMES = {"by", "\u00d7"}  # between the numbers of a shape
# Words before a number that counts the thing behind it. Behind other words it is the name or the
# amount of something: "localhost 8080", "employee 20417", "earns 95000".
BEFORE = frozenset(
    "a about add all also an and another append approximately around aus back be bitte build"
    " but con contain containing contains de di do emit exactly first for from genau get have"
    " hold include insert it just last length like me mich mir mit need needs next nur of only"
    " or out please plus put random roughly same see send some the then times to top up us use"
    " von want wants we with you".split()
)
# Words after a number that do not name things.
NO_THINGS = frozenset(
    "about again an and answers are as at because but by can could did do does for from had has"
    " have he how i if in is it may no not now of on or she should so than that the then they this"
    " to today too versus vs was we were what when where which who will with would you".split()
)
# Words behind the number of what is not written so often.
UNITS = frozenset(
    "words seconds minutes hours days weeks months years people persons users students employees"
    " dollars euros pounds usd eur km miles meters metres kg kb mb gb ms percent degrees".split()
)
# What a number looks like in a shape, a range, "500x"; 0x10 is none.
SHAPE = re.compile(r"(?<=\d)(?<!\b0)[ \t]*[x\u00d7*][ \t]*(?=\d)")
RANGE = re.compile(r"(?<![\w-])(\d+)[-\u2013](?=\d+(?![\w-]))")
FACTOR = re.compile(r"\bx(?=\d)|(?<=\d)x\b|\b(?:mal|fois|veces|volte|vezes)\b")
# Verbs of a sentence that asks for something; also German, French, Spanish and Italian ones.
ASKS = re.compile(
    r"\b(?:count|create|draw|echo|fill|generate|give|list|make|output|print|produce|repeat|return|say"
    r"|show|type|write|written|erstelle|erzeuge|gib|schreibe?|wiederhole|zeige?|[e\u00e9]cris"
    r"|g\u00e9n\u00e8re|r\u00e9p\u00e8te|escribe|genera|repite|ripeti|scrivi)\b"
)
SENTENCE = re.compile(r"(?<=[.!?])\s|\n")
WISH = re.compile(
    r"(?<![\w.,$\u20ac\u00a3#/@^+\\-])(?<!\d[:'])(?:\d{1,3}(?:[.,_' \u00a0\u202f]\d{3})+|\d{1,9})"
    r"(?=k\b|(?![\w/@^\\]|[.,:'-]\d| ?[%$\u20ac\u00a3]))|[^\W\d_]+|[\u00d7.;:!?]"
)


def asked(text: str) -> tuple[int, int]:
    """What a message asks for: how often, by its largest number, as in "write 1,000 zeros" and
    "five hundred zeros", or the product of a shape, as in "16x16"; and at most how many tokens."""
    numbers = [*_numbers(text.lower())]
    cells = max((count for count, is_shape in numbers if is_shape), default=0)
    return max(numbers, default=(0, False))[0], max(MAX_ASKED, min(4 * MAX_ASKED, CELL * cells))


def _numbers(text: str) -> Iterator[tuple[int, bool]]:
    """The numbers that may be asked for, and whether each is of a shape."""
    is_long = len(text) > MAX_WISH
    for sentence in SENTENCE.split(f"{text[:MAX_WISH]}\n{text[-MAX_WISH:]}" if is_long else text):
        asks = bool(ASKS.search(sentence))
        if asks or not is_long:
            yield from _counted(sentence, asks)


def _counted(sentence: str, asks: bool) -> Iterator[tuple[int, bool]]:
    """`_numbers` of a sentence."""
    text = FACTOR.sub(" times ", RANGE.sub(r"\1 to ", SHAPE.sub(" \u00d7 ", sentence)))
    number, shape, before, lead = 0, 1, "", ""
    for part, after in pairwise([*WISH.findall(text), "", ""]):
        digits = re.sub(r"\D", "", part)
        lead = lead if number else before
        before = part
        if part in WORDS:
            number += WORDS[part]
        elif part in SCALES:
            last = number % SCALES[part]
            number += (last or 1) * SCALES[part] - last
        elif part in TIMES and number and (after in WORDS or after[:1].isdigit()):
            shape, number = shape * number, 0
        elif part not in ("and", "a"):
            if number or not digits:
                count = shape * number
                if count <= MAX_CELLS if shape > 1 else _is_wish(count, lead, part, asks):
                    yield count, shape > 1
                shape = 1
            number = int(digits or 0)


def _is_wish(count: int, lead: str, after: str, asks: bool) -> bool:
    """Whether a number between two words says how often something is wanted: it counts a thing, or
    its sentence `asks` for something."""
    if (count in YEARS and count != 2000) or after in UNITS:
        return False
    thing = after.isalpha() and after not in NO_THINGS
    if after == "times":
        return True
    if lead[1:].isalpha() and lead not in BEFORE and not ASKS.fullmatch(lead):
        return False
    return asks or thing or not (after or lead[1:] or lead == ":")
