"""A stand-in for the Hugging Face hub that takes commits: the part of its protocol that ``huggingface_hub`` uses."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.conftest import listening

Files = dict[str, bytes]


class Hub:
    """The repositories of one user. ``refused`` is a pattern of addresses that answer with 403."""

    def __init__(self, role: str = "write", scopes: tuple[str, ...] = ()):
        self.token = {"role": role} | ({"fineGrained": {"scoped": [{"permissions": [*scopes]}]}} if scopes else {})
        self.known = True  # whether the hub knows the token
        self.commits: dict[str, list[Files]] = {}  # of each repository, the files after each commit
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}  # uploaded large files by SHA-256
        self.uploads = 0
        self.refused = ""

    def files(self, repo: str) -> Files:
        return self.commits[repo][-1] if self.commits[repo] else {}

    def commit(self, repo: str, lines: list[dict]) -> None:
        """Apply a commit as a whole, or raise KeyError if a large file has not arrived."""
        files = dict(self.files(repo))
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        self.commits[repo].append(files)


def oid(name: str, content: bytes) -> str:
    """What the hub names a file by: SHA-256 if it is large, else git's own hash."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    address: str

    def do_GET(self):
        hub, path = self.hub, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.refused and re.search(hub.refused, path):
            return self.reply({"error": "refused by the test"}, 403)
        if path == "/api/whoami-v2":
            return self.reply({"name": "me", "auth": {"accessToken": hub.token}}, 200 if hub.known else 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            there = repo in hub.commits
            hub.commits.setdefault(repo, [])
            hub.private.setdefault(repo, asked.get("private", asked.get("visibility") == "private"))
            return self.reply({"url": f"{self.address}/{repo}", "id": repo}, 409 if there else 200)
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if path.startswith("/upload/"):
            hub.uploads += 1
            hub.blobs[hashlib.sha256(body).hexdigest()] = body
            return self.reply({})
        repo = re.match(r"(?:/api/models)?/([\w-]+/[\w-]+)", path)[1]
        if repo not in hub.commits:
            return self.reply({}, 404)
        if path.endswith("/objects/batch"):
            return self.reply(
                {"transfer": "basic", "objects": [self.place(each) for each in json.loads(body)["objects"]]}
            )
        if "/preupload/" in path:
            return self.reply({"files": [self.mode(repo, each["path"]) for each in json.loads(body)["files"]]})
        if "/commit/" in path:
            hub.commit(repo, [json.loads(line) for line in body.splitlines()])
            number = f"{len(hub.commits[repo]):040x}"
            return self.reply(
                {"success": True, "commitOid": number, "commitUrl": f"{self.address}/{repo}/commit/{number}"}
            )
        if "/tree/" in path:
            return self.reply([{"type": "file", "path": name, "size": len(content), "oid": oid(name, content)}
                               for name, content in hub.files(repo).items()])  # fmt: skip
        return self.reply({"id": repo, "sha": f"{len(hub.commits[repo]):040x}", "siblings": [], "tags": []})

    do_POST = do_PUT = do_HEAD = do_GET

    def place(self, asked: dict) -> dict:
        """Where to send a large file; nowhere if it is there."""
        there = asked["oid"] in self.hub.blobs
        return asked | ({} if there else {"actions": {"upload": {"href": f"{self.address}/upload/{asked['oid']}"}}})

    def mode(self, repo: str, name: str) -> dict:
        content = self.hub.files(repo).get(name)
        how = {"path": name, "uploadMode": "lfs" if name.endswith(".safetensors") else "regular", "shouldIgnore": False}
        return how | ({} if content is None else {"oid": oid(name, content)})

    def reply(self, what: object, code: int = 200) -> None:
        content = json.dumps(what).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(hub: Hub, monkeypatch) -> Iterator[str]:
    """This process uses ``hub`` as its hub; yields its address."""
    from huggingface_hub import constants

    handler = type("Handler", (_Handler,), {"hub": hub})
    with listening(handler) as handler.address:
        monkeypatch.setattr(constants, "ENDPOINT", handler.address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own for large files
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        yield handler.address
