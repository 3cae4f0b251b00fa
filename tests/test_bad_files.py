"""Files that hold anything, to every reader of one: none raises what it does not promise."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxspec.cache import disk
from mlxspec.commands import models
from mlxspec.config import ConfigError, load_config
from mlxspec.kernels.verify import VerdictFile
from mlxspec.load.warmup import WarmupCache
from mlxspec.model.layout import LayoutChoice
from mlxspec.server.embeddings import _pooling
from mlxspec.server.errors import ApiError
from mlxspec.service import crashes
from mlxspec.speculate.controller import GRID
from mlxspec.speculate.heads import load_head
from mlxspec.speculate.heads.files import find_head
from mlxspec.training.run import resume
from mlxspec.training.samples import SampleFile
from mlxspec.types import CacheBytes
from tests.heads import kinds
from tests.support.bad_values import RAW, VALUES

HOLES = ["%s", '{"a": %s}']
VERDICT = {
    "variant": "a",
    "reason": "",
    "parked": False,
    "least": 1,
    "most": 2,
    "error": 0.1,
    "gains": {},
}
COSTS = {"rows": GRID, "measured": [[1] * len(GRID)] * 2, "contexts": [1, 2], "sampling": {"a": 0}}
FIT = asdict(LayoutChoice("rows", True, False, CacheBytes(1, ((1, 1),), 0), 1))
KNOWN = {"layout": FIT, "costs": COSTS, "kernels": ""}


def holes(whole: dict[str, Any], around: str = "%s") -> list[str]:
    """The object with a hole in the place of each of its values."""
    return [around % json.dumps({**whole, key: "@"}).replace('"@"', "%s") for key in whole]


def told_by_flaws(file: Path) -> None:
    data = file.read_bytes()
    weights = file.parent / "model.safetensors"
    weights.write_bytes(len(data).to_bytes(8, "little") + data)
    models.damage(file.parent)
    weights.unlink()


def label_of(file: Path) -> None:
    data = file.read_bytes()
    for content in (data, len(data).to_bytes(8, "little") + data):
        with contextlib.suppress(ValueError):
            disk.read_label(BytesIO(content))
        assert disk.decode(content, "0" * 32) is None


def settings_of(file: Path) -> None:
    load_config({}, {"MLXSPEC_CONFIG": str(file)})


def crashes_of(file: Path) -> None:
    assert len(crashes.read(file, 1e9)) <= crashes.SAFE_CRASHES


def verdicts_of(file: Path) -> None:
    found = VerdictFile(file.parent, {})
    found.path.write_bytes(file.read_bytes())
    found.load()


def samples_of(file: Path) -> None:
    for sample in SampleFile(file, 320).read().values():
        assert 0 < sample.first <= len(sample.tokens) and max(sample.tokens) < 320


def state_of(file: Path) -> None:
    """Of a training, and as a header of safetensors."""
    data = file.read_bytes()
    trainer: Any = SimpleNamespace(resume=lambda tensors: None)
    for content in (data, len(data).to_bytes(8, "little") + data):
        file.with_name("state.safetensors").write_bytes(content)
        resume(trainer, file.with_name("state.safetensors"), "")


def head_of(file: Path) -> None:
    """As a head's config.json, and as its tensors."""
    data = file.read_bytes()
    place = file.parent / "head"
    place.mkdir(exist_ok=True)
    for content in (data, len(data).to_bytes(8, "little") + data):
        (place / "config.json").write_bytes(data)
        (place / "model.safetensors").write_bytes(content)
        assert load_head(find_head(place), kinds.plain_target()) is None


def pooling_of(file: Path) -> None:
    place = file.parent / "1_Pooling"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes(file.read_bytes())
    model: Any = SimpleNamespace(
        name="m", base="m", server=SimpleNamespace(paths={"m": file.parent})
    )
    with contextlib.suppress(ApiError):
        assert _pooling(model) in ("last", "mean")


SAMPLE = {"tokens": [1, 2], "first": 1}
READERS: dict[str, tuple[Callable[[Path], object], tuple[type[Exception], ...], list[str]]] = {
    "verdicts": (verdicts_of, (), holes(VERDICT, '{"a 1": %s}')),
    "known": (WarmupCache.load, (), holes(KNOWN)),
    "fit": (WarmupCache.load, (), holes(FIT, json.dumps({**KNOWN, "layout": "@"}).replace('"@"', "%s"))),
    "costs": (WarmupCache.load, (), holes(COSTS, json.dumps({**KNOWN, "costs": "@"}).replace('"@"', "%s"))),
    "crashes": (crashes_of, (), ["[%s]", "[1, %s]"]),
    "weights": (told_by_flaws, (), ['{"w": %s}', '{"w": {"data_offsets": [0, %s]}}']),
    "run": (label_of, (), ['{"__metadata__":%s}', '{"__metadata__":{"keys":%s}}']),
    "samples": (samples_of, (), ['["k", %s]', '[%s, {"tokens": [1], "first": 1}]', *holes(SAMPLE, '["k", %s]')]),
    "state": (state_of, (), ['{"w": %s}', '{"__metadata__": {"samples": %s}}']),
    "head": (head_of, (), ['{"hidden_norm.weight": %s, "fc.weight": {}}', '{"mlx_lm_extra_tensors": %s}', '{"mlx_lm_extra_tensors": {"mtp_file": %s}}', '{"text_config": {"mtp_num_hidden_layers": %s}}']),
    "pooling": (pooling_of, (), ['{"pooling_mode": %s}', '{"pooling_mode_lasttoken": %s}']),
    "settings": (settings_of, (ConfigError,), ["port = %s", "zzz = %s", "[%s]", "%s.a = 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_holds_anything(tmp_path: Path, name: str) -> None:
    read, errors, shapes = READERS[name]
    file = tmp_path / "file"
    for data in RAW + [
        (h.replace("%s", v)).encode() for h in HOLES + shapes for v in VALUES.values()
    ]:
        file.write_bytes(data)
        try:
            read(file)
        except errors as error:
            assert str(file) in str(error)


def test_weights_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "none")
    assert models.weight_bytes(tmp_path) == 0 and len(models.damage(tmp_path)) == 1
