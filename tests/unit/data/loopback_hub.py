"""A local hub: the part of the Hugging Face hub's protocol that its clients use, with failures on demand."""

import http.server
import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePosixPath

from dlr_pretrain.data import Source, open_source
from tests.conftest import listening
from tests.unit.data.data_corpus import make_config

_LETTERS = random.Random(0)
TEXTS = [f"document {i} " + "".join(_LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=i % 90)) for i in range(400)]
KEYS = {"train__global_batch": 4, "train__seq_len": 16}
TROUBLE = ("429", "503", "403", "stall", "truncate", "reset", "no bytes")
STALL_SECONDS = 1.0  # what the client under test waits; a stall lasts until it has closed the connection


class Hub:
    """Files of one dataset and of any model, and what was asked for.

    ``trouble(path, first)`` names what goes wrong with a request for a file's bytes from ``first`` on, or None.
    """

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.commit = "a" * 40  # the newest
        self.commits = {"a" * 40, "b" * 40}
        self.trouble: Callable[[str, int], str | None] = lambda path, first: None
        self.gated = False
        self.revisions: set[str] | None = None  # that exist; None: all
        self.retry_after = "0"
        self.ranges = 0  # that were asked for
        self.told: list[str] = []  # failures that occurred

    def random_trouble(self, seed: int, share: float) -> None:
        """A ``share`` of the requests fails, in every way in turn, in a random order."""
        rng, lock, deck = random.Random(seed), threading.Lock(), []

        def trouble(path: str, first: int) -> str | None:
            with lock:
                if rng.random() >= share:
                    return None
                deck.extend(() if deck else rng.sample(TROUBLE, len(TROUBLE)))
                return deck.pop()

        self.trouble = trouble


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self):
        hub, path = self.hub, self.path.split("?")[0]
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if "/resolve/" in path:
                self.resolve(path)
            elif "/tree/" in path:
                self.describe(self.tree(path.split("/tree/")[1].partition("/")[2]))
            elif "/paths-info/" in path:
                self.describe([self.entry(name) for name in hub.files])
            elif path.startswith(("/api/datasets/", "/api/models/")):
                _, given, asked = path.rpartition("/revision/")
                if given and hub.revisions is not None and asked not in hub.revisions:
                    return self.reply(b"", 404, {"X-Error-Code": "RevisionNotFound"})
                commit = asked if asked in hub.commits else hub.commit
                siblings = [{"rfilename": name} for name in hub.files]
                self.describe({"id": "x/y", "sha": commit, "tags": [], "siblings": siblings})
            else:
                self.reply(b"{}", 404)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def describe(self, what: object) -> None:
        self.reply(json.dumps(what).encode())

    def tree(self, folder: str) -> list[dict]:
        """The files and folders below a folder."""
        below = [name for name in self.hub.files if name.startswith(f"{folder}/") or not folder]
        folders = {str(above) for name in below for above in PurePosixPath(name).parents} - {".", folder}
        folders = {name for name in folders if name.startswith(folder)}
        told = [{"type": "directory", "path": name, "size": 0, "oid": "c" * 40} for name in sorted(folders)]
        return [*map(self.entry, below), *told]

    def entry(self, name: str) -> dict:
        return {"type": "file", "path": name, "size": len(self.hub.files[name]), "oid": "b" * 40}

    def resolve(self, path: str) -> None:
        """The answer to a request for a file, whole or in part."""
        hub, (commit, _, name) = self.hub, path.split("/resolve/")[1].partition("/")
        about = {"X-Repo-Commit": hub.commit, "ETag": f'"{"b" * 40}"', "Accept-Ranges": "bytes"}
        if hub.gated:
            return self.reply(b"", 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        if commit not in ({*hub.commits, hub.commit, "main"}) or name not in hub.files:
            return self.reply(b"", 404)
        if self.command == "HEAD":
            return self.reply(hub.files[name], 200, about)
        hub.ranges += 1
        spans = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
        first, last = int(spans[1]), int(spans[2] or len(hub.files[name]) - 1)
        trouble = hub.trouble(name, first)
        if trouble:
            hub.told.append(trouble)
        if trouble and trouble[:3].isdigit():
            return self.reply(b"", int(trouble[:3]), {"Retry-After": hub.retry_after})
        self.send_range(name, first, last, about, trouble)

    def send_range(self, name: str, first: int, last: int, about: dict, trouble: str | None) -> None:
        whole = self.hub.files[name]
        body, code = whole[first : last + 1], 200
        if "Range" in self.headers:
            about, code = about | {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(whole)}"}, 206
        sent = {None: len(body), "no bytes": 0}.get(trouble, len(body) // 2)
        self.reply(body, code, about, sent)
        if trouble == "stall":
            self.wfile.flush()
            self.rfile.read()
        if trouble == "reset":
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if trouble:
            self.close_connection = True

    def reply(self, body: bytes, code: int = 200, headers: dict | None = None, sent: int | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])


def serving(hub: Hub) -> AbstractContextManager[str]:
    """The hub's address."""
    return listening(type("Handler", (_Handler,), {"hub": hub}))


@contextmanager
def serving_here(hub: Hub, monkeypatch) -> Iterator[Hub]:
    """This process uses ``hub`` as its hub, with waits of milliseconds."""
    from huggingface_hub import HfFileSystem, constants, file_download
    from huggingface_hub.utils import _http

    from dlr_pretrain.data import files as client

    with serving(hub) as address:
        files = address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": files}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", files, raising=False)  # a copy, before 1.0
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", STALL_SECONDS)
        monkeypatch.setattr(_http.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
        for name, seconds in {"FIRST_CONTACT": 600.0, "FIRST_WAIT": 0.005, "LONGEST_WAIT": 0.05}.items():
            monkeypatch.setattr(client, f"{name}_SECONDS", seconds)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()


def open_hub(**keys) -> Source:
    """The hub's shards, as ``data=c4`` finds them by default."""
    return open_source(make_config("c4", **(KEYS | keys)))
