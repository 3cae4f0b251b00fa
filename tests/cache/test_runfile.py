"""The file of a run: it comes back bit for bit, or, changed in any way, not at all."""

import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlxspec.cache.runfile import (
    DTYPES,
    LABEL,
    Run,
    encode,
    fingerprint,
    keys_of,
    label,
    listing,
    pieces,
    put,
    read,
)

MODEL = "0123456789abcdef"
KEYS = (b"a" * 16, b"b" * 16)


def data(run: Run) -> bytes:
    return b"".join(pieces(run, encode(run, MODEL, "tiny")))


def same(a: Run, b: Run) -> bool:
    """Bit for bit, order and all."""
    return (a.keys, a.meta, list(a.arrays)) == (b.keys, b.meta, list(b.arrays)) and all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for x, y in zip(a.arrays.values(), b.arrays.values(), strict=True)
    )


def back(run: Run, folder: Path) -> Run | None:
    path = folder / "run.safetensors"
    content = data(run)
    put(path, pieces(run, encode(run, MODEL, "tiny")), 1)
    assert path.read_bytes() == content
    return read(path, MODEL, len(content))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5, 2)], ids=str)
def test_every_dtype_and_shape_comes_back(
    dtype: np.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    raw = np.random.default_rng(1).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    array = (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)
    run = Run(KEYS, {"odd": np.arange(3, dtype=np.uint8), "x": array}, {"a": "b", "ü": "\n"})
    found = back(run, tmp_path)
    assert found is not None and same(run, found)
    assert not found.arrays["x"].flags.writeable and found.arrays["x"].flags.aligned


def arrays() -> st.SearchStrategy[dict[str, np.ndarray]]:
    one = st.sampled_from([*DTYPES.values()]).flatmap(
        lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0))
    )
    return st.dictionaries(
        st.text(max_size=5).filter(lambda x: x != "__metadata__"), one, max_size=4
    )


@given(
    arrays(),
    st.dictionaries(st.text(), st.text(), max_size=3),
    st.lists(st.binary(min_size=16, max_size=16), min_size=1),
)
def test_any_run_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    some: dict[str, np.ndarray],
    meta: dict[str, str],
    keys: list[bytes],
) -> None:
    run = Run(tuple(keys), some, meta)
    folder = tmp_path_factory.getbasetemp()
    found = back(run, folder)
    assert found is not None and same(run, found)
    told = label(folder / "run.safetensors")
    assert (
        told
        and keys_of(told) == run.keys
        and (told["model"], told["fingerprint"]) == ("tiny", MODEL)
    )


def test_a_view_is_written_as_it_looks(tmp_path: Path) -> None:
    run = Run(KEYS, {"x": np.arange(24).reshape(4, 6)[::2, ::-1].T}, {})
    found = back(run, tmp_path)
    assert found is not None and same(run, found)


def test_others_can_read_it(tmp_path: Path) -> None:
    import mlx.core as mx

    run = Run(
        KEYS,
        {"k": np.arange(6, dtype=np.float16).reshape(2, 3), "n": np.uint8(7).reshape(())},
        {"a": "b"},
    )
    back(run, tmp_path)
    found = mx.load(str(tmp_path / "run.safetensors"))
    assert (found["k"].tolist(), found["n"].item()) == ([[0, 1, 2], [3, 4, 5]], 7)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run((), {}, {}), "keys"),
        (Run((b"short",), {}, {}), "16 bytes"),
        (Run(KEYS, {"x": np.array(["text"])}, {}), "'x'.*<U4"),
        (Run(KEYS, {"x": np.array([None])}, {}), "object"),
        (Run(KEYS, {"x": np.zeros(1, ">f4")}, {}), "'x'"),
        (Run(KEYS, {"__metadata__": np.zeros(1)}, {}), "reserves"),
        (Run(KEYS * 1000, {}, {}), f"pass {LABEL} bytes"),
        (Run(KEYS, {}, {"x": "y" * LABEL}), f"pass {LABEL} bytes"),
    ],
)
def test_what_no_file_can_hold_is_refused_by_name(run: Run, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(run, MODEL, "tiny")


def test_the_longest_label_is_found_in_one_read(tmp_path: Path) -> None:
    run = Run(KEYS, {}, {"x": "y" * (LABEL - 400)})
    assert back(run, tmp_path) and label(tmp_path / "run.safetensors")


# ---- damage
# ----------------------------------------------------------------------------------------------


def flipped(path: Path, content: bytes, bit: int) -> Run | None:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    label(path)  # unverified, but no bit makes it raise
    return read(path, MODEL, len(content))


def test_every_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    run = Run(KEYS[:1], {"x": np.arange(5, dtype=np.float16)}, {"n": "1"})
    content, path = data(run), tmp_path / "run.safetensors"
    assert len(content) < 500
    assert [bit for bit in range(8 * len(content)) if flipped(path, content, bit) is not None] == []
    path.write_bytes(content)
    assert read(path, MODEL, len(content)) is not None


def test_flipped_bits_of_a_large_file_are_misses_and_cost_no_memory(tmp_path: Path) -> None:
    run = Run(KEYS, {f"{i}": np.random.default_rng(i).normal(size=(64, 99)) for i in range(20)}, {})
    content, path, rng = data(run), tmp_path / "run.safetensors", random.Random(1)
    tracemalloc.start()
    bits = [
        *range(64),
        *(rng.randrange(8 * len(content)) for _ in range(60)),
    ]  # the header's length too
    assert [bit for bit in bits if flipped(path, content, bit) is not None] == []
    assert tracemalloc.get_traced_memory()[1] < 5 * len(content)
    tracemalloc.stop()


def test_every_truncation_is_a_miss(tmp_path: Path) -> None:
    run = Run(KEYS, {"x": np.arange(5)}, {})
    content, path = data(run), tmp_path / "run.safetensors"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert read(path, MODEL, len(content)) is None and read(path, MODEL, size) is None
        label(path)
    path.write_bytes(content + b"\0")
    assert read(path, MODEL, len(content)) is None and read(path, MODEL, len(content) + 1) is None


def test_a_file_of_another_model_is_a_miss(tmp_path: Path) -> None:
    run = Run(KEYS, {}, {})
    assert back(run, tmp_path) is not None
    assert read(tmp_path / "run.safetensors", MODEL[::-1], len(data(run))) is None


LEAD = b"\0" * 8 + b'{"__metadata__":'
NO_KEYS = [b"[]", b"{}", b'{"keys":1}', b'{"keys":""}', b'{"keys":"zz"}', b'{"keys":"00"}']
NO_LABELS = [*NO_KEYS, b"[" * 60_000, b'{"keys":"' + b"0" * 32 + b'","x":1}']


@pytest.mark.parametrize(
    "content", [b"", b"x", b"[" * 60_000, *(LEAD + x for x in NO_LABELS)], ids=range(11)
)
def test_a_label_of_anything_else_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    assert label(tmp_path / "x") is None and read(tmp_path / "x", MODEL, len(content)) is None


def test_what_is_no_file_raises_or_is_a_miss_and_never_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("fifo")
    assert read(tmp_path / "fifo", MODEL, 0) is None
    for name in ("folder", "link", "gone"):
        with pytest.raises(OSError):
            read(tmp_path / name, MODEL, 0)
    for name in ("folder", "link", "gone"):
        with pytest.raises(OSError):
            label(tmp_path / name)
    assert label(tmp_path / "fifo") is None


# ---- writing
# ---------------------------------------------------------------------------------------------


def test_a_file_is_its_owners_alone_and_has_its_time(tmp_path: Path) -> None:
    put(
        tmp_path / "x.safetensors",
        [memoryview(b"ab"), memoryview(b""), memoryview(b"c")],
        1_234_567_890_123_456_789,
    )
    found = (tmp_path / "x.safetensors").stat()
    assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o600, 1_234_567_890_123_456_789)
    assert (tmp_path / "x.safetensors").read_bytes() == b"abc"


def test_a_failed_write_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    put(path, [memoryview(b"old")], 1)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        put(path, [memoryview(b"new")], 1)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


def test_listing_knows_its_own(tmp_path: Path) -> None:
    ours = [f"{MODEL}/{'0' * 32}.safetensors", f"{MODEL}/.{'1' * 32}.tmp"]
    others = [f"{MODEL}/README", f"{MODEL}/0.safetensors", f"Notes/{'0' * 32}.safetensors", "lock"]
    for name in [*ours, *others]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / MODEL / f"{'2' * 32}.safetensors").mkdir()
    (tmp_path / MODEL / f"{'3' * 32}.safetensors").symlink_to("README")
    assert sorted(name for name, _ in listing(tmp_path)) == sorted(ours)
    assert list(listing(tmp_path / "gone")) == []


# ---- which model
# -----------------------------------------------------------------------------------------


def test_the_fingerprint_follows_all_that_counts(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"

    def now(**about: str) -> str:
        return fingerprint(tmp_path, {"layout": "rows", **about})

    def write(content: bytes, mtime: int = 1) -> None:
        weights.write_bytes(content)
        os.utime(weights, ns=(mtime, mtime))

    (tmp_path / "config.json").write_text("{}")
    content = bytes(range(256)) * 4096
    write(content)
    seen = [now()]
    assert now() == seen[0] and len(seen[0]) == 32

    def changed() -> bool:
        seen.append(now())
        return len(set(seen)) == len(seen)

    seen += [now(kv_bits="8"), now(layout="gather")]
    for at in (0, 100, len(content) - 1):
        write(content[:at] + b"!" + content[at + 1 :])
        assert changed()
    write(content + b"!")
    assert changed()
    write(content, mtime=2)
    assert changed()
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert changed()
    (tmp_path / "code.py").write_text("x = 1")
    assert changed()
    weights.rename(tmp_path / "model-1.safetensors")
    assert changed()
    (tmp_path / "README.md").write_text("said, not computed with")
    assert now() == seen[-1]


def test_the_fingerprint_reads_samples_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte, all hole
    fingerprint(tmp_path, {})
