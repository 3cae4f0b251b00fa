"""The parts of the report: each yields its lines, or raises Elsewhere, Failed or Late."""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.first_mac.commands import (
    ELSEWHERE,
    ON_A_MAC,
    OPS,
    PART_S,
    ROOT,
    Elsewhere,
    Failed,
    bench,
    only_on_a_mac,
    run,
)
from bench.first_mac.loaded import exact, instances, lossless, memory, steps

LABEL = "dev.mlxspec.first-mac"
# Of mlx-lm's prompt and answer; how often.
LENGTHS = ("-p", "256", "-g", "96", "-n", "3") if ON_A_MAC else ("-p", "64", "-g", "24", "-n", "2")
ASKED = ("--max-tokens", "64") if ON_A_MAC else ("--workload", "code", "--max-tokens", "24")
LOWER = 0.98  # answers that part at a tie have other rounds
SHOWN_S = 8  # of the menu bar's item


def machine(model: str) -> Iterator[str]:
    """What doctor says. What it finds broken is for the reader to judge, and fails no part."""
    words = [sys.executable, "-m", "mlxspec", "doctor", *([model] if model else [])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PART_S)
    if done.stderr or not done.stdout:
        raise Failed(f"doctor ended with {done.returncode}: {done.stderr[-2000:]}")
    yield done.stdout.strip()


def compiled(model: str) -> Iterator[str]:
    """Every instance of every kernel through Apple's offline compiler."""
    only_on_a_mac()
    if subprocess.run(
        ["xcrun", "-sdk", "macosx", "metal", "--version"], capture_output=True
    ).returncode:
        raise Elsewhere("Xcode's Metal compiler is not installed; the kernels' tests compile too")
    import mlx.core as mx

    headers = Path(mx.__file__).parent / "include"
    words = ["xcrun", "-sdk", "macosx", "metal", "-fno-fast-math", "-I", str(headers), "-c"]
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "scripts/metal", folder)
        files = sorted(Path(folder).glob("*.metal"))
        if int(platform.mac_ver()[0].partition(".")[0]) < 26:  # it has no tensors
            files = [file for file in files if "MetalPerformancePrimitives" not in file.read_text()]
        took = {}
        for file in files:
            began = time.monotonic()
            run(*words, str(file), "-o", str(file.with_suffix(".air")))
            took[file.stem] = time.monotonic() - began
        yield f"{len(took)} instances in {sum(took.values()):.0f} s"
        for name in sorted(took, key=took.__getitem__, reverse=True):
            yield f"{took[name]:6.2f} s  {name}"


def kernels(model: str) -> Iterator[str]:
    """The kernels' tests on the GPU."""
    only_on_a_mac()
    said = run("scripts/test", "-m", "metal", "-q", "-ra", "-n", "4", seconds=2 * PART_S)
    yield from said.splitlines()[-12:]


def speed(model: str) -> Iterator[str]:
    """Plain decoding, and with what drafts by default; mlx-lm and llama.cpp beside them."""
    yield bench(model, *ASKED)
    yield from mlx_lm_speed(model)
    gguf = sorted((ROOT / "build").glob("*.gguf"))
    if (tool := shutil.which("llama-bench")) and gguf:
        yield run(tool, "-m", str(gguf[0]), "-p", "256", "-n", "96")
    else:
        yield f"llama.cpp: {ELSEWHERE}; needs llama-bench, and this model as build/*.gguf"


def acceptance(model: str) -> Iterator[str]:
    """A kernel is wrong if fewer drafts are accepted with it than with MLX's own."""
    only_on_a_mac()
    found = {}
    for kernels in ("off", "auto"):
        env = {"MLXSPEC_KERNELS": kernels}
        said = bench(model, "--workload", "edits", "--max-tokens", "128", env=env)
        found[kernels] = tokens_per_round(said)
    yield f"tokens a round of edits: {found['off']} without our kernels, {found['auto']} with them"
    if found["auto"] < LOWER * found["off"]:
        raise Failed("fewer drafts are accepted with our kernels")


def tokens_per_round(table: str) -> float:
    """From the table of `mlxspec bench` with one workload."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    names = next(row for row in rows if row[:1] == ["workload"])
    values = next(row for row in rows if row[:1] == ["edits"])
    return float(values[names.index("tokens per round")])


def mlx_lm_speed(model: str) -> Iterator[str]:
    """Its own figure for the same model, in a process of its own, with the BLAS that we have."""
    from bench.servers import LAUNCH
    from mlxspec import blas
    from mlxspec.config import load_config
    from mlxspec.load.resolve import models_of, on_disk

    config = load_config({"model": model or None})
    path = on_disk(models_of(config)[0], config)
    library = str(blas.load() or "")
    words = ["-c", LAUNCH, library, "mlx_lm.benchmark:main", "--model", str(path), *LENGTHS]
    # Its own command buffers, and the kernels that it has by default.
    ours = (OPS, "MLX_ENABLE_TF32", "MLX_GDN_PACKED")
    said = run(sys.executable, *words, seconds=PART_S, without=ours)
    yield from (f"mlx-lm: {line}" for line in said.splitlines() if "Averages" in line)


def service(model: str) -> Iterator[str]:
    """launchd starts the server under a label of its own, hands it a socket, and forgets it."""
    only_on_a_mac()
    from mlxspec.service import launchd

    if launchd.agent_file().exists():
        raise Elsewhere("the service is installed, and would be waited for")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"port": str(port), **({"model": model} if model else {})}
    agent = launchd.definition(flags, os.environ) | {"Label": LABEL}
    log = Path(tempfile.gettempdir()) / f"{LABEL}.log"
    agent["StandardOutPath"] = agent["StandardErrorPath"] = str(log)
    began = time.monotonic()
    try:
        launchd.load_agent(agent)
        while time.monotonic() - began < 60:
            try:
                with socket.create_connection(("127.0.0.1", port), 5) as client:
                    client.settimeout(60)
                    client.sendall(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                    answer = client.recv(200).split(b"\r\n")[0].decode()
                    if " 200 " not in answer:
                        time.sleep(0.5)  # 503: it loads
                        continue
                    took = time.monotonic() - began
                    yield f"launchd's socket answered {answer} after {took:.1f} s"
                    return
            except OSError:
                time.sleep(0.5)
        said = log.read_text("utf-8", "replace")[-2000:] if log.exists() else "nothing"
        raise Failed(f"no answer within 60 s; the log says: {said}")
    finally:
        launchd.remove_agent(LABEL)
        log.unlink(missing_ok=True)


def menubar(model: str) -> Iterator[str]:
    """The menu bar item stays for some seconds."""
    only_on_a_mac()
    try:
        import rumps  # noqa: F401  only whether it is there
    except ImportError as error:
        raise Elsewhere("rumps is missing; make first-mac installs it") from error
    words = [sys.executable, "-m", "mlxspec", "menubar"]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            process.wait(SHOWN_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            yield f"shown for {SHOWN_S} s; look whether it was there"
            return
        raise Failed(f"it ended with {process.returncode}: {process.stderr.read()[-2000:]}")


# In the order in which they run: the last ones may be left without time.
PARTS: dict[str, Callable[[str], Iterator[str]]] = {
    part.__name__: part
    for part in (
        machine,
        instances,
        lossless,
        exact,
        steps,
        memory,
        service,
        menubar,
        acceptance,
        speed,
        compiled,
        kernels,
    )
}
