"""A W&B server on the loopback, as much of it as the real client needs, and a run directory that is sent there."""

from __future__ import annotations

import http.server
import io
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.wandb_view import WandbView

KEY = "0123456789abcdef" * 2 + "01234567"
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens
LINES = {"wandb-history.jsonl": "history", "wandb-events.jsonl": "events"}


class WandbServer:
    """Runs by their id, as the client left them; ``trouble`` makes it answer otherwise.

    ``trouble``: None, "stall" (it takes the request and says nothing), "junk" (an answer without sense), or the status
    that it answers with.
    """

    def __init__(self):
        self.trouble: str | int | None = None
        self.runs: dict[str, dict] = {}
        self.requests = 0
        self.released = threading.Event()  # lets go of what stalls

    def steps(self, run_id: str) -> list[int]:
        return [row["step"] for row in self.runs[run_id]["history"]]

    def answer(self, path: str, content: bytes) -> dict:
        if path == "/graphql":
            body = json.loads(content)
            return {"data": self._query(body.get("operationName"), body.get("variables") or {})}
        if path.endswith("/file_stream"):
            body, run = json.loads(content), self.runs[path.split("/")[-2]]
            for name, chunk in (body.get("files") or {}).items():
                lines = [json.loads(line) for line in chunk["content"]] if name.endswith(("jsonl", ".json")) else []
                if name in LINES:
                    run[LINES[name]][chunk["offset"] :] = lines
                elif name == "wandb-summary.json":
                    run["summary"] = lines[-1]
            run |= {"exit_code": body["exitcode"]} if body.get("complete") else {}
        return {}

    def _query(self, name: str | None, given: dict) -> dict:
        if name == "ServerFeaturesQuery":  # of wandb 0.20
            return {"serverInfo": {"features": []}}
        if name == "RunResumeStatus":
            return {
                "model": {"id": "m", "name": "p", "entity": {"id": "e", "name": "e"}, "bucket": self._bucket(given)}
            }
        if name == "UpsertBucket":
            new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], {"history": [], "events": [], "summary": {}, "config": {}})
            run.pop("exit_code", None)
            run["config"] = json.loads(given["config"]) if given["config"] else run["config"]
            project = {"id": "m", "name": given["project"], "entity": {"id": "e", "name": "e"}}
            bucket = {"id": "b", "name": given["name"], "displayName": given["displayName"], "config": given["config"]}
            bucket |= {"historyLineCount": len(run["history"]), "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": new}}
        if name == "CreateRunFiles":
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {}

    def _bucket(self, given: dict) -> dict | None:
        if (run := self.runs.get(given["name"])) is None:
            return None
        bucket = {
            "id": "b",
            "name": given["name"],
            "displayName": "d",
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": 1}),  # without t the client takes the run for a new one
        }
        bucket |= {"config": json.dumps(run["config"]), "summaryMetrics": json.dumps(run["summary"])}
        for name in ("history", "events"):
            bucket[f"{name}Tail"] = json.dumps([json.dumps(line) for line in run[name][-1:]])
            bucket[f"{name}LineCount"] = len(run[name])
        return bucket | {"logLineCount": 0}


@contextmanager
def wandb_server():
    """Yields the server and its address."""
    server = WandbServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server.requests += 1
            if server.trouble == "stall":
                server.released.wait()
                return
            if server.trouble is None:
                status, answer = 200, server.answer(self.path, body)
            else:
                status, answer = (200 if server.trouble == "junk" else server.trouble), {"data": {}}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{listening.server_port}"
    finally:
        server.released.set()
        listening.shutdown()
        listening.server_close()


class Trained:
    """A run directory whose metrics a test writes, and the view of them."""

    def __init__(self, folder: Path, *overrides: str):
        folder.mkdir(exist_ok=True)
        self.dir, self.cfg = folder, load(["scale=tiny", "data=sample", "logger=wandb", "train.steps=9", *overrides])
        self.said = io.StringIO()
        self.console = Console(self.cfg, enabled=True, stream=self.said)

    def start(self, resumed_step: int = 0) -> None:
        self.file = MetricsFile(self.dir / "metrics.jsonl", resumed_step)
        self.view = WandbView(self.cfg, self.dir, self.console)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.file.write({"step": step, "train/loss": 1 / step, "perf/mfu": None, "time": 1e9 + step})

    def end(self, error: BaseException | None = None) -> None:
        self.view.__exit__(type(error) if error else None, error, None)
        self.file.__exit__()

    def wait_until(self, true, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.said.getvalue()
            time.sleep(0.05)

    def connect(self) -> None:
        self.wait_until(lambda: self.view.connected)
