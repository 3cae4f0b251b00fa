"""Which kernel MLX takes on Metal for a product, in pure Python.

Rule: it follows MLX 0.32's source, named beside each rule (paths below mlx/backend/), and knows
nothing of mlxspec. A kernel is a small number, an order of summation: two kernels of one number add
the same values in the same order, whatever their tiles are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

# Of dense products, and of quantized ones; a split of K into n is SPLIT + n, of dense
# ones SPLIT + log2(n), which these have in powers of two.
GEMV, GEMV_WIDE, GEMV_HALF, TILES, NAX, NAX_SPLIT, DOT, GEMV_LONG, SPLIT = range(1, 10)
QMV, QMV_QUAD, QMV_WIDE = range(1, 4)
REDUCED, REDUCED_TWICE, REDUCED_LONG = range(1, 4)


@dataclass(frozen=True)
class Matrix:
    """The last two of an array's dimensions as MLX passes them on, and the strides of the others
    (metal/matmul.cpp:27 check_transpose, which copies what has neither layout)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def laid_out(self, is_vector: bool) -> tuple[bool, "Matrix"]:
        """Whether it is transposed, and the array that is passed on."""
        *_, rows, columns = self.shape
        *_, x, y = self.strides
        if y == 1 and (not is_vector or x == columns):
            return False, self
        if x == 1 and (not is_vector or y == rows):
            return True, self
        return False, contiguous(self.shape)


def contiguous(shape: tuple[int, ...]) -> Matrix:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return Matrix(shape, tuple(strides))


def collapsed(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """The size and strides of what remains of dimensions that lie one behind the other in all
    arrays: common/utils.cpp:20 collapse_contiguous_dims."""
    groups: list[list[int]] = [[]]
    for i, size in enumerate(shape):
        if i and any(each[i] * size != each[i - 1] for each in strides):
            groups.append([])
        if size != 1:
            groups[-1].append(i)
    kept = []
    for group in filter(None, groups):
        size = 1
        for i in group:
            size *= shape[i]
        kept.append((size, *(each[group[-1]] for each in strides)))
    return kept or [(1, *(0 for _ in strides))]


@dataclass(frozen=True)
class Chip:
    """`gen` and `size` of its GPU, as in applegpu_g13s: M1 is 13, M5 17; g: base and Pro, s: Max,
    d: Ultra."""

    gen: int
    size: str = "g"

    def limit(self, k: int, n: int) -> int:
        """Rows from which a quantized product is one of matrices: metal/quantized.cpp:85."""
        of = 0 if max(k, n) <= 2048 else 1 if max(k, n) <= 4096 else 2
        if self.gen >= 17 and self.size != "d":
            return (33, 25, 13)[of]
        if self.gen >= 15 and self.size != "d":
            return (13, 15, 13)[of]
        if self.size == "d":
            return (32, 18, 12)[of]
        return (14, 10, 6)[of]

    def quantized(
        self,
        rows: int,
        n: int,
        k: int,
        *,
        mode: str,
        bits: int,
        group: int,
        batch: int = 1,
        halves: bool = True,
    ) -> int:
        """Of x [batch, rows, k] and transposed weights [n, k]: metal/quantized.cpp:1782."""
        if rows < self.limit(k, n):  # :1739
            if k in (64, 128) and bits in (2, 4, 8):
                return QMV_QUAD
            wide = mode != "affine" or self.gen >= 15
            return QMV_WIDE if rows > 1 and wide else QMV
        split = 512 // (ceil(n / 32) * ceil(rows / 32)) if batch == 1 else 1  # :1139
        align = max(32, group)
        split = max(1, min(split, k // align))
        while split > 1 and k % (split * align):
            split -= 1
        if split > 1:
            return SPLIT + split
        return NAX if self.gen >= 17 and k % 64 == 0 and halves else TILES  # :1039

    def dense(self, a: Matrix, b: Matrix, halves: bool) -> int:
        """Of a [..., m, k] and b [..., k, n] of one batch shape: metal/matmul.cpp:1451. `halves`:
        of 16 bits; others in TF32 never, as MLX_ENABLE_TF32=0 says."""
        (m, k), n = a.shape[-2:], b.shape[-1]
        a_transposed, a = a.laid_out(m == 1)
        b_transposed, b = b.laid_out(n == 1)
        dims = collapsed(a.shape[:-2], a.strides[:-2], b.strides[:-2])
        batch = 1
        for size, *_ in dims:
            batch *= size
        size, of_a, of_b = dims[-1]
        one = batch > 1 and len(dims) == 1 and not a_transposed
        if one and a.strides[-2] == k and of_a == m * k and of_b == 0:  # :1493
            m, batch = m * size, 1
        if m == n == batch == 1:
            return DOT
        wide = self.gen >= 15 and halves and not k % 4 and min(m, n) > 1  # :1299
        if wide and m <= 15 and b_transposed and not a_transposed:
            return GEMV_WIDE if m <= 5 or n <= 64 else GEMV_HALF
        if min(m, n) == 1:  # :1168
            turned = a_transposed if n == 1 else not b_transposed
            longer = not turned and k > 64 and k >= 16 * (m if n == 1 else n)
            return GEMV_LONG if longer else GEMV
        return self._matrices(m, n, k, batch, halves)

    def _matrices(self, m: int, n: int, k: int, batch: int, halves: bool) -> int:
        """metal/matmul.cpp:913; tiles of any size add by eights (kernels/steel/gemm/mma.h)."""
        longest = max(m, n)
        if self.gen >= 17 and halves:
            long = k >= 3 * longest or (longest <= 1024 and k > 2 * longest)
            return NAX_SPLIT if batch == 1 and long else NAX
        small = ceil(m / 16) * ceil(n / 16) <= (2048 if self.size in "sd" else 1024)
        if batch > 1 or not small or k // 16 < 8 or k < longest:
            return TILES
        parts = k // 16 // (ceil(m / 32) * ceil(n / 32))  # :533
        return SPLIT + min(max(1, (parts - 1).bit_length()), 5)

    def experts(self, rows: int, count: int, is_sorted: bool, quantized: bool) -> int:
        """metal/quantized.cpp:1905, metal/matmul.cpp:2838."""
        enough = not quantized or (rows >= 16 and rows >= 4 * count)
        return TILES if is_sorted and enough else GEMV

    def attention(self, rows: int, slots: int) -> int:
        """Of a sequence's rows and heads; with shorter contexts than those of
        metal/scaled_dot_product_attention.cpp:483, :876."""
        if rows > 32:
            return TILES
        return 1 if slots < 64 else 2 if rows < 8 else 3


def reduced(shape: Sequence[int], axis: int, outputs: int) -> int:
    """Of a sum over one axis of a contiguous array: metal/reduce.cpp:557, :937. One over the last
    axis adds in an order that its length alone sets, by row_reduce_simple and by
    row_reduce_looped."""
    length = shape[axis]
    behind = 1
    for size in shape[axis + 1 :]:
        behind *= size
    if behind == 1 or length < 32:
        return REDUCED
    if behind < 32 and length >= 1024:
        return REDUCED_LONG
    return REDUCED_TWICE if length > 256 and outputs // 32 < 1024 else REDUCED


CHIPS = {
    "M1": Chip(13),
    "M2": Chip(14, "s"),
    "M3": Chip(15),
    "M4": Chip(16, "s"),
    "M5": Chip(17),
    "M3 Ultra": Chip(15, "d"),
}
