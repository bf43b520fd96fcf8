"""W&B and TensorBoard show a run and never block it. The clients are real; the W&B server is on the loopback."""

import http.server
import io
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.train import views
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.views import View, open_view, wandb_id
from dlr_pretrain.util.errors import EXIT_STOPPED, Stopped
from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT, listening

KEY = "0123456789abcdef" * 2 + "01234567"
TINY = ["scale=tiny", "data=sample", "logger=wandb", "train.steps=9"]
SECRETS = {"HF_TOKEN": "hf_" + "pLanted" * 5, "HTTPS_PROXY": "http://planted-user:planted-password@127.0.0.1:9"}


class WandbServer:
    """The part of a W&B server that the real client needs. It never answers a path that ends with ``silent``."""

    def __init__(self):
        self.silent: str | None = None
        self.runs: dict[str, dict] = {}
        self.unanswered, self.released = threading.Event(), threading.Event()  # ``released`` ends pending requests

    def answer(self, path: str, content: bytes) -> dict:
        if path == "/graphql":
            body = json.loads(content)
            return {"data": self._query(body.get("operationName"), body.get("variables") or {})}
        if path.endswith("/file_stream"):
            body, run = json.loads(content), self.runs[path.split("/")[-2]]
            for name, chunk in (body.get("files") or {}).items():
                if name == "wandb-history.jsonl":
                    run["history"][chunk["offset"] :] = map(json.loads, chunk["content"])
                elif name == "wandb-summary.json":
                    run["summary"] = json.loads(chunk["content"][-1])
            run |= {"exit_code": body["exitcode"]} if body.get("complete") else {}
        return {}

    def _query(self, name: str | None, given: dict) -> dict:
        project = {"id": "m", "name": given.get("project"), "entity": {"id": "e", "name": "e"}}
        if name == "RunResumeStatus":
            return {"model": project | {"bucket": self._bucket(given)}}
        if name == "UpsertBucket":
            new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], {"history": [], "summary": {}, "config": {}})
            run.pop("exit_code", None)
            run["config"] = json.loads(given["config"]) if given["config"] else run["config"]
            return {"upsertBucket": {"bucket": self._bucket(given) | {"project": project}, "inserted": new}}
        return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}} if name == "CreateRunFiles" else {}

    def _bucket(self, given: dict) -> dict | None:
        if (run := self.runs.get(given["name"])) is None:
            return None
        bucket = {"id": "b", "name": given["name"], "displayName": "d", "tags": [], "notes": None, "logLineCount": 0}
        bucket |= {"config": json.dumps(run["config"]), "summaryMetrics": json.dumps(run["summary"])}
        bucket |= {"historyTail": json.dumps([json.dumps(row) for row in run["history"][-1:]]), "eventsTail": "[]"}
        bucket |= {"historyLineCount": len(run["history"]), "eventsLineCount": 0}
        return bucket | {"wandbConfig": json.dumps({"t": 1})}  # without t the client would treat the run as new


@pytest.fixture(autouse=True)
def server(tmp_path, monkeypatch):
    """A W&B server that clients find, with a key and an empty home folder, and without the user's W&B settings."""
    wandb, server = pytest.importorskip("wandb"), WandbServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if server.silent is not None and self.path.endswith(server.silent):
                server.unanswered.set()
                server.released.wait(600)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(server.answer(self.path, body)).encode())

    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    own = {"WANDB_API_KEY": KEY, "NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path)}
    for hook in ("exit", "excepthook"):  # wandb replaces them
        monkeypatch.setattr(sys, hook, getattr(sys, hook))
    with listening(Handler) as address:
        for name, value in (own | {"WANDB_BASE_URL": address}).items():
            monkeypatch.setenv(name, value)
        yield server
        server.released.set()
        wandb.teardown()


def history(folder: Path) -> list[dict]:
    """The history in a W&B folder, as W&B's own reader prints it."""
    line = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    records = map(json.loads, subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines())
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def viewed(folder: Path, *words: str) -> tuple[View, io.StringIO]:
    """An open W&B view of a run directory, and its console output."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").touch()
    cfg, said = load([*TINY, *words]), io.StringIO()
    return open_view(cfg, folder, Console(cfg, enabled=True, stream=said), 0), said


def test_a_run_in_two_starts_is_one_curve_without_a_secret(tmp_path, train, server, monkeypatch, no_export, capfd):
    for name, value in (SECRETS | {"NO_PROXY": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", f"+hydra.job.env_set.HF_TOKEN={SECRETS['HF_TOKEN']}"])
    for repository in (["init"], ["remote", "add", "origin", "https://planted-user:planted-password@host/x.git"]):
        subprocess.run(["git", "-C", str(tmp_path), *repository], check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        train(run, "logger=wandb", "train.stop_after=7")
    train(run, "logger=wandb")
    said, sent = capfd.readouterr().out, server.runs[wandb_id(run)]
    for row, record in zip(sent["history"], read_metrics(run / "metrics.jsonl"), strict=True):
        assert all(row.get(name) == record.get(name) for name in ("step", "train/loss", "eval/loss"))
    assert sent["exit_code"] == 0 and sent["config"]["backbone"]["value"]["name"] == "lowrank"
    assert len(server.runs) == 1 and f"/runs/{wandb_id(run)}" in said and "warning" not in said
    texts = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    texts += [said.encode(), repr(server.runs).encode()]
    planted = [KEY, SECRETS["HF_TOKEN"], "planted-"]
    assert [secret for text in texts for secret in planted if secret.encode() in text] == []


@pytest.mark.full
@pytest.mark.parametrize(("silent", "said"), [("", "offline (Failed"), ("file_stream", "lacks the last metrics")])
def test_a_server_that_never_answers_ends_only_the_view(tmp_path, words, server, silent, said):
    server.silent = silent
    short = os.environ | {"WANDB_INIT_TIMEOUT": "2", "WANDB_FINISH_TIMEOUT": "2"}
    line = [sys.executable, str(ROOT / "train.py"), *words(f"run.dir={tmp_path}/run", "logger=wandb")]
    done = subprocess.run(line, env=short, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    text = " ".join(done.stdout.split())
    assert done.returncode == 0 and server.unanswered.is_set() and not server.released.is_set(), done.stderr
    assert said in text and "Traceback" not in done.stderr
    folder = next((tmp_path / "run" / "wandb").glob("offline-run-*" if silent == "" else "run-*"))
    assert f"wandb sync {folder.parent if silent == '' else folder}" in text
    assert [row["step"] for row in history(folder)] == [*range(1, 21)]


@pytest.mark.full
def test_without_a_key_the_printed_command_sends_the_run(tmp_path, words, server):
    keyless = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"} | {"TERM": "xterm"}
    terminal, inside = pty.openpty()  # on a terminal, wandb would ask for a key
    for stop in ("train.stop_after=7", "train.stop_after=12"):
        line = [sys.executable, str(ROOT / "train.py"), *words(f"run.dir={tmp_path}/run", "logger=wandb", stop)]
        trained = subprocess.run(line, stdin=inside, stderr=inside, stdout=subprocess.PIPE, text=True, env=keyless)
        said = " ".join(trained.stdout.split())
        assert trained.returncode == EXIT_STOPPED and "offline (No API key configured" in said
    os.close(inside), os.close(terminal)
    sends = said.partition("to send this run: ")[2].split()[:3]
    subprocess.run(f"{sys.executable} -m {' '.join(sends)}", shell=True, check=True, capture_output=True)
    assert [row["step"] for row in server.runs[wandb_id(tmp_path / "run")]["history"]] == [*range(1, 13)]


def test_a_later_start_adds_the_evaluation_of_a_step(tmp_path, server):
    """A stop abandons an evaluation, which the next start makes up for; a start after that sends it no more."""
    run, step = tmp_path / "run", {"step": 1, "train/loss": 2.0, "time": 1e9}
    for record in (step, step | {"eval/loss": 3.0}, step | {"eval/loss": 3.0}):
        view, _ = viewed(run)
        with view:
            view.log(record)
    assert [row.get("eval/loss") for row in server.runs[wandb_id(run)]["history"]] == [None, 3.0]


def test_the_next_start_sends_only_what_the_server_lacks(tmp_path, server):
    run = tmp_path / "run"
    for shown, written in (((1, 2), (1, 2, 3)), ((3, 4), ())):  # killed before step 3 was sent, and trained again
        view, _ = viewed(run)
        records = {s: {"step": s, "train/loss": 1 / s, "perf/mfu": None, "time": 1e9 + s} for s in shown + written}
        with view:
            for step in shown:
                view.log(records[step])
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(records[step]) + "\n" for step in written)
    sent = server.runs[wandb_id(run)]["history"]
    rows = [(row["step"], row["train/loss"], row["_timestamp"]) for row in sent]
    assert rows == [(s, 1 / s, 1e9 + s) for s in (1, 2, 3, 4)]
    assert not any("perf/mfu" in row or "time" in row for row in sent)


@pytest.mark.parametrize(("variables", "words", "shown"), [
    ({}, [], {"project": "dlr_pretrain", "group": "tiny-ab", "name": "tiny-s42-ab", "tags": ()}),
    ({"WANDB_PROJECT": "p", "WANDB_RUN_GROUP": "g", "WANDB_TAGS": "a,b", "WANDB_RUN_ID": "i", "WANDB_DIR": "{other}"},
     ["logger.project=mine", "logger.notes=n"],
     {"project": "mine", "notes": "n", "group": "g", "tags": ("a", "b"), "id": "i", "dir": "{other}"}),
    ({"WANDB_DISABLED": "true"}, [], None),
])  # fmt: skip
def test_wandb_variables_are_obeyed_and_our_keys_win(tmp_path, monkeypatch, variables, words, shown):
    (other := tmp_path / "other").mkdir()
    for name, value in ({"WANDB_MODE": "offline"} | variables).items():
        monkeypatch.setenv(name, value.format(other=other))
    opened, made = [], views.init
    monkeypatch.setattr(views, "init", lambda *of: opened.append(made(*of)) or opened[0])
    view, _ = viewed(tmp_path / "tiny-s42-ab", *words)
    if shown is None:
        assert view is None and not (tmp_path / "tiny-s42-ab/wandb").exists()
        return
    with view:
        pass
    for name, value in shown.items():
        found = getattr(opened[0], name)
        assert found.startswith(str(other)) if name == "dir" else found == value


def test_a_sink_that_hangs_or_fails_loses_only_its_records(monkeypatch):
    console = Console(load(TINY), enabled=True, stream=io.StringIO())
    gate = threading.Event()

    class Sink(list):
        def log(self, record):
            gate.wait(600)
            self.append(record["step"] // record["step"])

        def close(self, exit_code):
            self.append(f"exit {exit_code}")

    sink = Sink()
    view = View("it", console, lambda: sink)
    for step in range(1, 8):
        view.log({"step": step})
    gate.set()
    view.__exit__(Stopped)
    assert sink == [*[1] * 7, "exit 0"]
    with View("it", console, Sink) as view:
        view.log({"step": 0})
        view.log({"step": 1})
    assert console.stream.getvalue().count("it has stopped (integer") == 1
    monkeypatch.setattr(views, "CLOSE_SECONDS", 0.0)
    gate.clear()
    with View("it", console, Sink) as view:
        view.log({"step": 1})
    assert "was abandoned" in console.stream.getvalue()
    gate.set()


def test_tensorboard_shows_the_run_also_after_a_resume(tmp_path, train, no_export, capsys):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(Stopped):
        train(tmp_path / "run", "logger=tensorboard", "train.stop_after=7")
    train(tmp_path / "run", "logger=tensorboard")
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("train/loss", "eval/loss"):
        trained = [(r["step"], r[name]) for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if name in r]
        assert [event.step for event in found.Scalars(name)] == [step for step, _ in trained]
        assert [event.value for event in found.Scalars(name)] == pytest.approx([loss for _, loss in trained])
    assert f"tensorboard --logdir {tmp_path}/run/tensorboard" in " ".join(capsys.readouterr().out.split())
