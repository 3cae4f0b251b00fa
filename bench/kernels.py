"""What our kernels for few rows should cost on Apple's chips, counted in metal/small_qmm.metal.

Rule: a prediction, fitted to no measurement of a kernel. A lane's cycles for a weight are counted
in the source; their throughput was measured by others on M1 and M2, and is taken to be the same on
later chips. Weights take the longer of reading them and of these cycles, as if both overlapped.
"""

from collections.abc import Callable, Sequence
from math import ceil

from rich.table import Table

from bench.chips import CHIPS, CURVES, RATES, STOCK, Curve
from bench.formula import Model, batch_speed, head_speed
from bench.heads import Pairing
from bench.macs import CHOICES, PLAIN, Choice, drafters
from bench.sizes import target
from bench.tables import empty

Rate = Callable[[Curve], float]
ROWS = 16  # that a launch takes
REQUESTS = 8

# Cycles of a lane, at the throughput in philipturner/metal-benchmarks. The pipeline for extracting
# bits, shifting and converting integers takes 4 for each and runs beside the others, which take 1
# for an fma, a bitwise operation or a conversion of floats, 2 for a shuffle. A load is counted as 1.
RUN = 8  # weights of a column that a lane unpacks at once, from a word or two
UNPACKED = {  # the format: (cycles of that pipeline, instructions in all, scales and biases of a run)
    "affine": (4 + 4, 3, 2),  # extract, convert, fma
    # Of the 8 codes of a word: 7 shifts, 3 bitwise for each pair; of each, convert and scale twice.
    "mxfp4": (4 * 7 / 8, 7 / 8 + 3 / 2 + 3, 1),
}
SHARED = 4  # columns that use a value of x once a lane has loaded and converted it
MATRIX_ROWS = 8
MULTIPLY = 18 / 2  # an 8x8x8 product takes 18, and a lane holds 2 of its weights
MATRIX_X = 2 * 16 / 32  # a lane loads and converts 16 values of x for 32 weights
BITS = {"mxfp4": 4}
GROUP = {"affine": 64, "mxfp4": 32}
SCALES = {"affine": 4, "mxfp4": 1}  # bytes of a group's scale and bias


def cycles(rows: int, bits: int, mode: str = "affine") -> float:
    """Of a lane, for a weight and all rows, with the faster of both kernels."""
    slow, issued, shuffled = UNPACKED[mode]
    unpack = issued + (bits / 4 + 2 * shuffled) / RUN
    lanes = rows * (1 + 2 / SHARED)
    matrix = ceil(rows / MATRIX_ROWS) * (MULTIPLY + MATRIX_X)
    return max(slow, unpack + min(lanes, matrix))


def ours(chip: str, bits: int, experts: str = "affine") -> Curve:
    """Costs of 1 to ROWS rows with weights of 4 or 8 `bits`, in units of reading them once. One row
    costs 1: it needs no kernel of ours. An expert is taken to have a row, and as many bits unless
    its mode says how many. Raises ValueError for other bits."""
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits: our kernels are counted for weights of 4 and 8")
    rate = RATES[chip][0] * 1e12 / 2  # an fma counts as two operations

    def cost(rows: int, mode: str) -> float:
        own = BITS.get(mode, bits)
        size = own / 8 + SCALES[mode] / GROUP[mode]
        return max(1.0, cycles(rows, own, mode) / rate * CHIPS[chip][0] * 1e9 / size)

    more = tuple((rows, cost(rows, "affine")) for rows in range(2, ROWS + 1))
    return Curve(((1, 1.0), *more), True, f"counted for the {chip}, {bits} bits", cost(1, experts))


def before_after(chip: str, bits: int, plain: float, rate: Rate, experts: str = "affine") -> str:
    """Two speeds: with the rows of MLX's own kernels, `?` where nobody measured them on such a chip,
    and with ours where they are faster. `plain`: the speed of single rows, which needs neither."""
    stock = STOCK.get((chip.split()[0], bits))
    before = rate(CURVES[stock]) if stock else 0.0
    after = max(plain, before, rate(ours(chip, bits, experts)))
    return f"{before:.0f} / {after:.0f}" if stock else f"? / {after:.0f}"


def with_kernels(chips: Sequence[str], context: int) -> Table:
    """Lines for each model of the README: one chat, REQUESTS at once, one with what drafts for
    it."""
    made = empty(("model", "chats", *(f"{chip}*" for chip in chips)), 2)
    for choice in CHOICES:
        model = target(choice.config, choice.bits)
        heads = drafters(choice)
        names = "1", f"{REQUESTS}", *(f"1, {p.name}" for p in heads[:1])
        columns = [_cells(choice, model, heads, chip, context) for chip in chips]
        for i, cells in enumerate(zip(*columns, strict=True)):
            made.add_row("" if i else choice.id.partition("/")[2], names[i], *cells)
    return made


def _cells(
    choice: Choice, model: Model, heads: Sequence[Pairing], chip: str, context: int
) -> list[str]:
    """Of one chip, downwards."""
    width = CHIPS[chip][0] * 1e9 * PLAIN[choice.config]
    plain = batch_speed(model, 1, width, context, CURVES["ideal"])

    def batch(curve: Curve) -> float:
        return batch_speed(model, REQUESTS, width, context, curve)

    def drafted(curve: Curve) -> float:
        return max(head_speed(model, p, width, context, curve) for p in heads)

    rates = [batch, drafted] if heads else [batch]
    both = (before_after(chip, choice.bits, plain, rate, model.mode) for rate in rates)
    return [f"{plain:.0f}", *both]
