"""A hub of Hugging Face's on this machine: repositories of small files, as its client asks for them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SHA = 40 * "a"


@dataclass
class Hub:
    """`repos` are the directories that it serves by id. While `holds` is set, files stop half way."""

    repos: dict[str, Path]
    cache: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)
    flows: threading.Event = field(default_factory=threading.Event)
    halves: int = 0  # files of which half was sent

    def answer(self, path: str) -> bytes | None:
        """The JSON or the file at a path; None is a 404."""
        for name, folder in self.repos.items():
            files = sorted(file for file in folder.iterdir() if file.is_file())
            if path.startswith(f"/api/models/{name}/tree/"):
                rows = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": oid(f)}
                    for f in files
                ]
                return json.dumps(rows).encode()
            if path.startswith(f"/api/models/{name}"):
                rows = [{"rfilename": f.name, "size": f.stat().st_size} for f in files]
                return json.dumps({"id": name, "sha": SHA, "siblings": rows}).encode()
            if path.startswith(f"/{name}/resolve/"):
                file = folder / path.rpartition("/")[2]
                return file.read_bytes() if file.is_file() else None
        return None


def oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            data = hub.answer(path)
            self.send_response(200 if data is not None else 404)
            if data is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            else:
                self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", SHA)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            if self.command != "GET" or not data:
                return
            half = len(data) // 2 if path.endswith(".safetensors") else len(data)
            try:
                self.wfile.write(data[:half])
                if half < len(data):
                    self.wfile.flush()
                    hub.halves += 1
                    hub.flows.wait(60)
                    self.wfile.write(data[half:])
            except OSError:
                pass  # the client has gone

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def hub_of(repos: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process and those that it starts use, and their cache."""
    hub = Hub(repos, cache)
    hub.flows.set()
    cache.mkdir(exist_ok=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(hub)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("mlxspec.model.hub.FOLDERS", ())
        try:
            yield hub
        finally:
            hub.flows.set()
            server.shutdown()
