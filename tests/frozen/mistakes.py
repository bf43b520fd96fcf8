"""Mistakes of a user, and what the answer must name: the key, the value, a word of the rule or the fix; the exit code.

Sentences are free to change. Each answer is an error message and no traceback.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.frozen.cases import COLA, overrides
from tests.frozen.process import Commands, Ended

CONFIG, FAILED = 2, 3

REFUSED: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def wrong(name: str, ended: Ended, codes: tuple[int, ...], named: tuple[str, ...]) -> Iterator[str]:
    """What the answer to a mistake lacks."""
    said = " ".join(ended.said.lower().split())
    lacking = [word for word in named if word.lower() not in said]
    if any(code not in codes for code in ended.codes):
        yield f"{name}: exit codes {ended.codes}, expected {codes}: {said[-300:]}"
    elif lacking:
        yield f"{name}: does not name {lacking}: {said[-300:]}"
    elif "traceback" in said:
        yield f"{name}: a traceback: {said[-300:]}"


def mistakes(commands: Commands, corpus: Path, tokenizer: Path, work: Path) -> Iterator[str]:
    """A line for each mistake that is answered otherwise than it should be."""
    for line, named in REFUSED.items():
        where = {"data.root": str(corpus), "tokenizer.path": str(tokenizer), "run.dir": str(work / "refused")}
        given = [word.format(root=corpus) for word in line.split()]
        where = {key: value for key, value in where.items() if key not in {word.split("=")[0] for word in given}}
        ended = commands.run(*overrides(*given), *(f"{key}={value}" for key, value in where.items()))
        yield from wrong(line, ended, (CONFIG,), tuple(name.format(root=corpus) for name in named))
    if (work / "refused").exists():
        yield "a run that was refused has left its folder"
    data = (f"data.root={corpus}", f"tokenizer.path={tokenizer}")
    yield from of_ranks(commands, [*overrides(*COLA), *data], work)
    yield from of_data(commands, corpus, tokenizer, work)
    yield from of_runs(commands, list(data), work)


def of_ranks(commands: Commands, words: list[str], work: Path) -> Iterator[str]:
    run = f"run.dir={work / 'ranks'}"
    yield from wrong("three ranks", commands.run(*words, run, ranks=3), (CONFIG,), ("3", "rank"))
    four = [word for word in words if not word.startswith(("train.global_batch", "train.micro_batch"))]
    ended = commands.run(*four, "train.global_batch=6", run, ranks=4)
    yield from wrong("a batch that ranks do not divide", ended, (CONFIG,), ("train.global_batch=6", "4"))


def of_data(commands: Commands, corpus: Path, tokenizer: Path, work: Path) -> Iterator[str]:
    """Files that are there, and wrong."""
    broken = work / "broken"
    shutil.copytree(corpus, broken)
    for shard in broken.glob("c4-train*"):
        shard.write_bytes(gzip.compress(json.dumps({"txt": "a text"}).encode()))
    words = [*overrides(*COLA), f"run.dir={work / 'broken_run'}"]
    ended = commands.run(*words, f"data.root={broken}", f"tokenizer.path={tokenizer}")
    yield from wrong("a document without text", ended, (FAILED,), (str(broken), "c4-train", "text"))
    ended = commands.run(*words, f"data.root={corpus}", f"tokenizer.path={tokenizer}", "data.train_files=none-*.gz")
    yield from wrong("no training file", ended, (FAILED,), ("data.train_files", "none-*.gz"))
    ended = commands.run(*words, "data=tokens", f"data.root={corpus}", f"tokenizer.path={tokenizer}")
    yield from wrong("a folder without tokens", ended, (FAILED,), ("data.root", str(corpus), "prepare_data.py"))
    for shard in broken.glob("c4-train*"):
        shard.write_bytes(b"not a gzip file")
    ended = commands.run(*words, f"data.root={broken}", f"tokenizer.path={tokenizer}")
    yield from wrong("a damaged shard", ended, (FAILED,), (str(broken), "c4-train"))
    (broken / "spiece.model").write_bytes(b"not a model")
    ended = commands.run(*words, f"data.root={corpus}", f"tokenizer.path={broken}/spiece.model")
    yield from wrong("a damaged tokenizer", ended, (CONFIG, FAILED), (f"{broken}/spiece.model",))


def of_runs(commands: Commands, data: list[str], work: Path) -> Iterator[str]:
    """Runs, checkpoints and folders that do not fit what is asked of them."""
    run = work / "run"
    words = [*overrides(*COLA), *data, f"run.dir={run}"]
    stopped = commands.run(*words, "train.stop_after=2")
    yield from wrong("a run that is to stop", stopped, (75,), ("step 2",))
    changed = [word.replace("train.lr=0.01", "train.lr=0.02") for word in words]
    named = ("train.lr", "0.01", "0.02", str(run), "run.dir")
    yield from wrong("another learning rate", commands.run(*changed), (FAILED,), named)
    changed = [word.replace("backbone=cola", "backbone=lost") for word in words]
    yield from wrong("another backbone", commands.run(*changed), (FAILED,), ("cola", "lost", str(run)))
    (shard,) = run.glob("checkpoints/step_*2/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-5])
    damaged = shard.parent
    yield from wrong("a damaged checkpoint", commands.run(*words), (FAILED,), ("checkpoint", damaged.name))
    ended = commands.run(str(damaged), script="scripts/fold.py")
    yield from wrong("folding a damaged checkpoint", ended, (FAILED,), (damaged.name,))
    ended = commands.run(str(run / "checkpoints" / "step_00000009"), script="scripts/fold.py")
    yield from wrong("folding a checkpoint that is not there", ended, (FAILED,), ("step_00000009", "step_00000002"))
    ended = commands.run(str(work / "nothing"), "--output", str(work / "report"), script="scripts/report.py")
    yield from wrong("a report of nothing", ended, (CONFIG, FAILED), (str(work / "nothing"),))
    ended = commands.run("scale=60n", "--json", script="scripts/plan.py")
    yield from wrong("a plan of an unknown scale", ended, (CONFIG,), ("scale", "60n", "60m"))
