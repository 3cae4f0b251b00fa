"""What others published: bandwidths and rates of Apple's chips, the cost of a verified row on them,
speeds of models.

Rule: every figure has its source beside it, and none was measured by this project. A chip without a
source is not here.
"""

from dataclasses import dataclass

# Peak memory bandwidth in GB/s as Apple announced it, and where that was read. A Max with fewer GPU
# cores has
# less, from M3 on; it is a chip of its own here where its figure has a source.
M1_PRO = "https://www.apple.com/gw/newsroom/2021/10/introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built"
M2_PRO = (
    "https://www.iphoneincanada.ca/mac/apple-unveils-m2-pro-and-m2-max-its-most-powerful-chips-yet/"
)
M3_PRO = "https://support.apple.com/en-au/117737"
M5_PRO = "https://mikeshouts.com/apple-m5-pro-m5-max/amp"
CHIPS: dict[str, tuple[float, str]] = {
    "M1": (68.2, "https://github.com/ggml-org/llama.cpp/pull/1642"),
    "M1 Pro": (200, M1_PRO),
    "M1 Max": (400, M1_PRO),
    "M1 Ultra": (
        800,
        "https://thetechportal.com/2022/03/09/apple-mac-studio-display-m1-ultra-chip/",
    ),
    "M2": (
        100,
        "https://www.macrumors.com/2022/06/06/apple-announces-m2-chip-with-support-for-up-to-24gb-memory/",
    ),
    "M2 Pro": (200, M2_PRO),
    "M2 Max": (400, M2_PRO),
    "M2 Ultra": (
        800,
        "https://propakistani.pk/2023/06/06/apple-m2-ultra-chip-unveiled-for-mac-pro-and-mac-studio/",
    ),
    "M3": (100, "https://thecloudconsultancy.co/news/apple-debuts-m4-processor-in-new-ipad-pro/"),
    "M3 Pro": (150, M3_PRO),
    "M3 Max 30-core": (300, M3_PRO),
    "M3 Max": (400, M3_PRO),
    "M3 Ultra": (819, "https://english.worldmagazine.it/431260"),
    "M4": (
        120,
        "https://www.tomshardware.com/pc-components/cpus/apple-silion-m4-processor-family-all-we-know-specs-benchmarks-pricing-release-date",
    ),
    "M4 Pro": (
        273,
        "https://techmoran.com/2024/10/31/apple-unveils-its-most-powerful-chips-the-m4-pro-and-m4-max/?amp=1",
    ),
    "M4 Max 32-core": (410, "https://english.worldmagazine.it/431260"),
    "M4 Max": (546, "https://www.macrumors.com/2024/10/30/apple-announces-m4-max-chip/"),
    "M5": (
        153,
        "https://the-decoder.com/apples-m5-chip-brings-faster-ai-to-macbook-ipad-and-vision-pro/",
    ),
    "M5 Pro": (307, M5_PRO),
    "M5 Max": (614, M5_PRO),
}
# TFLOPS in fp32, of the chip with all its GPU cores where its name has no number of them, and where
# that was read; where "instead of" or "two" follows, by the cores from a chip of its generation.
METAL_BENCHMARKS = "https://github.com/philipturner/metal-benchmarks"
HMC = "https://hmc-tech.com/gpu"
M5_RATE = f"{HMC}/apple-10-core-m5-vs-intel-uhd-620-1100mhz"
RATES: dict[str, tuple[float, str]] = {
    "M1": (2.62, METAL_BENCHMARKS),
    "M1 Pro": (5.31, METAL_BENCHMARKS),
    "M1 Max": (10.62, METAL_BENCHMARKS),
    "M1 Ultra": (21.23, METAL_BENCHMARKS),
    "M2": (3.58, METAL_BENCHMARKS),
    "M2 Pro": (6.8, METAL_BENCHMARKS),
    "M2 Max": (13.6, METAL_BENCHMARKS),
    "M2 Ultra": (27.2, f"{METAL_BENCHMARKS}, two M2 Max"),
    "M3": (3.58, f"{HMC}/apple_10_core_m3"),
    "M3 Pro": (6.44, f"{HMC}/apple-32-core-m4-max-vs-apple-18-core-m3-pro"),
    "M3 Max 30-core": (10.74, f"{HMC}/apple-8-core-m4-fl-vs-apple-30-core-m3-max"),
    "M3 Max": (14.32, f"{HMC}/apple-32-core-m4-max-vs-apple-40-core-m3-max"),
    "M3 Ultra": (
        28.63,
        f"{HMC}/apple-60-core-m3-ultra-vs-nvidia-geforce-rtx-3060, 80 cores instead of 60",
    ),
    "M4": (3.76, f"{HMC}/apple-10-core-m4-vs-apple-24-core-m1-max"),
    "M4 Pro": (7.53, f"{HMC}/apple-20-core-m4-pro-vs-intel-hd-620-1000mhz"),
    "M4 Max 32-core": (13.74, f"{HMC}/apple-32-core-m4-max-vs-apple-40-core-m3-max"),
    "M4 Max": (
        17.18,
        f"{HMC}/apple-32-core-m4-max-vs-apple-40-core-m3-max, 40 cores instead of 32",
    ),
    "M5": (4.45, M5_RATE),
    "M5 Pro": (8.9, f"{M5_RATE}, 20 cores instead of 10"),
    "M5 Max": (17.8, f"{M5_RATE}, 40 cores instead of 10"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """What reading the weights costs with some rows, in units of one row: points (rows, cost) from
    1 row up. `shared`: rows that go to the same expert read it once, which costs `expert` times its
    bytes."""

    points: tuple[tuple[int, float], ...]
    shared: bool
    source: str
    expert: float = 1.0

    def at(self, rows: int) -> float:
        """Between two points on their line. Raises ValueError beyond the last one."""
        if not 1 <= rows <= self.points[-1][0]:
            known = self.points[-1][0]
            raise ValueError(
                f"{rows} rows: this cost curve is known for 1 to {known}; take a smaller depth"
            )
        for (r0, c0), (r1, c1) in zip(self.points, self.points[1:], strict=False):
            if r0 <= rows <= r1:
                return c0 + (c1 - c0) * (rows - r0) / (r1 - r0)
        return self.points[0][1]


# Those of a chip were measured, of MLX's own kernels, relative to one row of the same source.
CURVES: dict[str, Curve] = {
    "ideal": Curve(
        ((1, 1), (64, 1)), True, "the roofline: every weight is read once, whatever the rows"
    ),
    "tile-of-8": Curve(
        ((1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (24, 3), (25, 4), (32, 4)),
        True,
        "a kernel that reads every weight once for 8 rows, without other costs: an assumption",
    ),
    "m2pro-4bit": Curve(
        ((1, 1), (2, 1.46), (4, 2.74), (8, 5.49), (16, 5.72)),
        False,
        "M2 Pro, 4 bits, whole steps of mlx-lm with a 4B model and as many requests, less what "
        "each reads of its own: Locals 0.2.1's documentation",
    ),
    "m4pro-4bit": Curve(
        ((1, 1), (2, 1.03), (3, 1.22), (4, 1.47), (6, 2.07), (8, 2.69)),
        False,
        "M4 Pro, 4 bits, 4096x24576, mlx 0.32.0: https://github.com/ml-explore/mlx/issues/3839",
    ),
    "m4pro-dspark": Curve(
        ((1, 1), (5, 1.41), (8, 1.41), (9, 2.43), (16, 2.43)),
        False,
        "M4 Pro, 4 bits, whole steps of a 27B with kernels of its own: "
        "https://github.com/ARahim3/mlx-dspark",
    ),
    "m4pro-8bit": Curve(
        ((1, 1), (5, 1), (6, 1.61), (8, 1.61)),
        False,
        "M4 Pro, 8 bits, MLP of a 27B: https://github.com/ARahim3/mlx-dspark",
    ),
    "m3max-4bit": Curve(
        ((1, 1), (2, 1), (4, 1.28), (6, 2.04), (8, 2.5), (16, 3.95), (32, 3.98)),
        False,
        "M3 Max, 4 bits, 5120x17408: https://github.com/ml-explore/mlx/pull/3863",
    ),
    "m3ultra-4bit": Curve(
        ((1, 1), (2, 1.83), (4, 3.26), (7, 5.28), (8, 6.12), (16, 6.32)),
        False,
        "M3 Ultra, 4 bits, 5120x17408, queued calls: https://github.com/ml-explore/mlx/issues/4265",
    ),
    "m5max-4bit": Curve(
        ((1, 1), (3, 1.12), (5, 1.45), (8, 2.23), (16, 3.89)),
        False,
        "M5 Max, a 70B model, whole steps: https://github.com/ml-explore/mlx/pull/3791",
    ),
    "linear": Curve(
        ((1, 1), (64, 64)),
        False,
        "every row reads all weights (MLX's affine matvec on M1): an assumption",
    ),
}
# MLX's own kernels, by the chip's generation and the bits of weights; but for M1's, not where
# nobody measured.
STOCK = {
    ("M1", 4): "linear",
    ("M2", 4): "m2pro-4bit",
    ("M3", 4): "m3max-4bit",
    ("M4", 4): "m4pro-4bit",
    ("M4", 8): "m4pro-8bit",
    ("M5", 4): "m5max-4bit",
}


@dataclass(frozen=True, slots=True)
class Published:
    """A speed that someone else published. `plain` and `drafted` are tokens/s without and with
    speculation, `tokens` those of a round; 0: not given. `context` is a guess where the source
    names none."""

    chip: str
    config: str
    bits: int
    context: int
    plain: float
    source: str
    depth: int = 0
    tokens: float = 0.0
    drafted: float = 0.0
    curve: str = ""  # where the cost of rows was measured on such a chip with such weights


DSPARK = "https://github.com/ARahim3/mlx-dspark"
# Measured on 2026-09-27 (Qwen3-8B) and 2026-09-28, as it says; its README gave others at other
# times.
DSPARK_DATA = f"{DSPARK}/blob/ed106c1e97ceeec204d23c976451512f4d42dfe1/docs/data/models.json"
MLX_LM = "https://github.com/ml-explore/mlx-lm"
RAPID = "https://github.com/raullenchai/Rapid-MLX/blob/main/evals/SCORECARD.md"
MLX_VLM = "https://github.com/Blaizzy/mlx-vlm/pull/2014"
LM_STUDIO = "https://github.com/lmstudio-ai/mlx-engine/issues/113"
PUBLISHED = (
    Published(
        "M1 Ultra", "qwen2.5-32b", 8, 512, 15.1, LM_STUDIO
    ),  # of DeepSeek-R1-Distill-Qwen-32B
    Published("M3 Pro", "qwen3-4b", 4, 2048, 44.62, f"{MLX_LM}/pull/1569"),
    Published("M4 Max", "qwen3-4b", 16, 2048, 52.5, MLX_LM),
    Published("M4 Max", "qwen3-4b", 8, 2048, 86.9, MLX_LM),
    Published("M4 Max", "qwen3-4b", 4, 2048, 134.5, MLX_LM),
    Published("M4 Max", "qwen3-30b-a3b", 4, 2048, 113.3, MLX_LM),
    Published(
        "M3 Ultra", "qwen3.8-27b", 4, 512, 37.7, RAPID
    ),  # measured on Qwen3.5-27B, which has these sizes
    Published("M4 Pro", "qwen3-8b", 8, 512, 29.5, DSPARK_DATA, 7, 3.37, 64.5, "m4pro-8bit"),
    Published("M4 Pro", "qwen3.8-27b", 8, 512, 8.2, DSPARK_DATA, 7, 5.42, 30.8, "m4pro-8bit"),
    Published("M4 Pro", "qwen3.8-27b", 4, 512, 14.7, DSPARK_DATA, 7, 5.09, 40.0, "m4pro-4bit"),
    Published("M4 Pro", "qwen3.8-27b", 4, 16384, 14.1, DSPARK_DATA, 7, 3.16, 25.2, "m4pro-4bit"),
    Published("M4 Pro", "qwen3.8-27b", 4, 32768, 12.9, DSPARK_DATA, 7, 3.24, 23.9, "m4pro-4bit"),
    Published("M5", "qwen3-4b", 8, 512, 28.2, f"{DSPARK}/issues/2"),
    Published("M5 Max", "qwen3.8-27b", 8, 512, 18.1, f"{DSPARK}/issues/8", 2, 2.49, 34.4),
    Published("M5 Max", "qwen3.8-27b", 4, 512, 33.4, MLX_VLM, 2, 2.43, 58.58, "m5max-4bit"),
)
