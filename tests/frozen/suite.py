"""Record and compare what the command line does: see the package's docstring."""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import math
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.frozen.cases import COLA, LONG, RUNS, SAME, overrides
from tests.frozen.mistakes import mistakes
from tests.frozen.process import Commands, Ended

HERE = Path(__file__).resolve().parent
RECORDING = HERE / "recording.json"
TOKENIZER = HERE / "spiece.model"
STOPPED = 75
# On another machine losses in fp32 are compared to REL in the first updates alone: training lets the rounding of other
# kernels grow. Measured between an AMD EPYC and an Intel Xeon: below 3e-7 in 20 updates, 1.4e-5 at the 40th.
REL, UPDATES = 1e-5, 20


def write_corpus(folder: Path) -> None:
    """C4-layout shards of seeded sentences, drawn by ``random()`` alone, whose numbers Python keeps for ever."""
    rng = random.Random(0)
    words = ["".join(pick(rng, "aeioulnrst") for _ in range(between(rng, 2, 6))) for _ in range(120)]
    folder.mkdir(parents=True)
    for split, shards, documents in (("train", 2, 120), ("validation", 1, 30)):
        for i in range(shards):
            lines = [json.dumps({"text": document(rng, words)}) + "\n" for _ in range(documents)]
            path = folder / f"c4-{split}.{i:05d}-of-{shards:05d}.json.gz"
            path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def between(rng: random.Random, least: int, most: int) -> int:
    return least + int(rng.random() * (most + 1 - least))


def pick(rng: random.Random, items):
    return items[int(rng.random() * len(items))]


def document(rng: random.Random, words: list[str]) -> str:
    sentences = (" ".join(pick(rng, words) for _ in range(between(rng, 3, 9))) for _ in range(between(rng, 1, 8)))
    return " ".join(f"{sentence}." for sentence in sentences)


def losses(run: Path) -> dict[int, dict]:
    """The records of metrics.jsonl by step; the last of a step counts. Empty while there is no file."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record for record in records}


def hashes(folded: Path) -> str:
    """Eight digits for the tensors' names, then eight for each tensor in their order: its dtype, shape and bytes."""
    import torch
    from safetensors.torch import load_file

    tensors = dict(sorted(load_file(folded / "model.safetensors").items()))
    content = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values()]
    kinds = [f"{t.dtype} {tuple(t.shape)} ".encode() for t in tensors.values()]
    hashed = ["\n".join(tensors).encode(), *map(bytes.__add__, kinds, content)]
    return "".join(hashlib.sha256(part).hexdigest()[:8] for part in hashed)


def result(run: Path, folded: Path | None = None) -> dict:
    records = losses(run)
    evaluated = {str(step): record["eval/loss"].hex() for step, record in records.items() if "eval/loss" in record}
    train = [records[step]["train/loss"].hex() for step in sorted(records)]
    return {"train": train, "eval": evaluated, "folded": hashes(folded or run / "folded")}


def expect(ended: Ended, *codes: int) -> Ended:
    if any(code not in codes for code in ended.codes):
        raise RuntimeError(f"exit codes {ended.codes}, expected {codes}:\n{ended.said[-3000:]}")
    return ended


class Cases:
    """Every case of the suite over the corpus ``corpus``; runs lie in ``work``, each in a folder of its own."""

    def __init__(self, corpus: Path, work: Path):
        self.data, self.work = (f"data.root={corpus}", f"tokenizer.path={TOKENIZER}"), work

    def all(self) -> dict[str, Callable[[Commands], dict]]:
        found = {name: lambda commands, name=name: self.plain(commands, name) for name in RUNS}
        special = {"long": self.interrupted, "elastic": self.elastic, "tokens": self.tokens, "swept": self.swept,
                   "folded later": self.folded_later, "parameters": self.parameters, "report": self.report}  # fmt: skip
        return special | found

    def words(self, run: str, *words: str) -> list[str]:
        return [*overrides(*words), *self.data, f"run.dir={self.work / run}"]

    def plain(self, commands: Commands, name: str) -> dict:
        words, ranks = RUNS[name]
        expect(commands.run(*self.words(name, *words), ranks=ranks, transformers=False), 0)
        return {name: result(self.work / name)}

    def interrupted(self, commands: Commands) -> dict:
        """An undisturbed run, one that is killed twice, one that is asked to stop; then the finished run again."""

        def send(number: int, run: str, step: int) -> Callable[[list[int]], None]:
            def act(pids: list[int]) -> None:
                deadline = time.monotonic() + 60
                while max(losses(self.work / run), default=0) < step and time.monotonic() < deadline:
                    time.sleep(0.002)
                for pid in pids:
                    os.kill(pid, number)

            return act

        expect(commands.run(*self.words("long", *LONG)), 0)
        for step in (10, 30):
            expect(commands.run(*self.words("killed", *LONG), meanwhile=send(signal.SIGKILL, "killed", step)), -9)
        expect(commands.run(*self.words("stopped", *LONG), meanwhile=send(signal.SIGTERM, "stopped", 20)), STOPPED)
        for run in ("killed", "stopped"):
            expect(commands.run(*self.words(run, *LONG)), 0)
        again = expect(commands.run(*self.words("stopped", *LONG)), 0)
        assert "complete" in again.said, again.said
        return {run: result(self.work / run) for run in ("long", "killed", "stopped")}

    def elastic(self, commands: Commands) -> dict:
        """One rank, then two that torchrun starts, then one again."""
        words = self.words("elastic", *COLA)
        expect(commands.run(*words, "train.stop_after=3"), STOPPED)
        ended = commands.torchrun(*words, "train.stop_after=6", ranks=2)
        assert ended.codes[0] != 0 and max(losses(self.work / "elastic")) == 6, ended.said[-3000:]
        expect(commands.run(*words), 0)
        return {"elastic": result(self.work / "elastic")}

    def tokens(self, commands: Commands) -> dict:
        """The text is tokenised once, and a run on the tokens is that on the text."""
        folder = str(self.work / "prepared")
        script = "scripts/prepare_data.py"
        expect(commands.run("data=c4_local", *self.data, "--output", folder, "--workers", "1", script=script), 0)
        words = [*overrides(*COLA, "data=tokens"), f"data.root={folder}", f"run.dir={self.work / 'tokens'}"]
        expect(commands.run(*words), 0)
        return {"tokens": result(self.work / "tokens")}

    def swept(self, commands: Commands) -> dict:
        """Two runs in one process, in folders that they name themselves."""
        root = self.work / "swept"
        expect(commands.run("-m", *overrides(*COLA, "seed=42,43"), *self.data, f"run.root={root}"), 0)
        found = sorted(root.glob("**/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        assert len(found) == 2, found
        return {f"swept {seed}": result(path.parent) for seed, path in zip((42, 43), found, strict=True)}

    def folded_later(self, commands: Commands) -> dict:
        """The last checkpoint of a finished run, folded by the script, is the run's own folder."""
        run, output = self.work / "fold", self.work / "fold" / "again"
        expect(commands.run(*self.words("fold", *COLA)), 0)
        (checkpoint,) = run.glob("checkpoints/step_*8")
        expect(commands.run(str(checkpoint), "--output", str(output), script="scripts/fold.py"), 0)
        return {"folded later": result(run, output)}

    def parameters(self, commands: Commands) -> dict:
        """The parameters that plan.py counts for the paper's smallest model."""
        found = {}
        for name in ("full", "lowrank", "lost", "cola_lax", "sltrain", "relora"):
            words = ("scale=60m", f"backbone={name}", "logger=jsonl", "--json")
            said = expect(commands.run(*words, script="scripts/plan.py"), 0).said
            found[name] = json.loads(said[said.index("{") :])["parameters"]["total"]
        return {"parameters": found}

    def report(self, commands: Commands) -> dict:
        """A report of a run as a page, as Markdown and as a picture."""
        expect(commands.run(*self.words("reported", *COLA)), 0)
        output = self.work / "report"
        expect(commands.run(str(self.work / "reported"), "--output", str(output), script="scripts/report.py"), 0)
        suffixes = {path.suffix for path in output.rglob("*") if path.is_file() and path.stat().st_size}
        return {"report": sorted(suffixes & {".html", ".md", ".png"})}


def record(tree: Path, only: str = "*", workers: int = 2) -> dict:
    """All cases (whose names match ``only``) of a checkout, with what the bits depend on."""
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "corpus")
        write_corpus(corpus)
        cases = Cases(corpus, Path(scratch, "runs")).all()
        names = [name for name in cases if fnmatch.fnmatch(name, only)]

        def share(worker: int) -> dict:
            found = {}
            with Commands(tree, Path(scratch, f"commands{worker}")) as commands:
                for name in names[worker::workers]:
                    try:
                        found |= cases[name](commands)
                    except Exception as error:
                        raise RuntimeError(f"case {name!r}: {error}") from error
            return found

        with ThreadPoolExecutor(workers) as pool:
            shares = list(pool.map(share, range(workers)))
    return {"machine": machine(), "cases": dict(sorted(item for found in shares for item in found.items()))}


def machine() -> dict[str, str]:
    """What the last bits of a run depend on."""
    import torch

    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((row.partition(":")[2].strip() for row in info.read_text().splitlines() if "model name" in row), cpu)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "kernels": capability, "cpu": cpu, "threads": "1"}


def save(recording: dict, path: Path) -> None:
    """Write a recording, a line a case."""
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in recording["cases"].items()]
    head = f'{{"machine": {json.dumps(recording["machine"])},\n"cases": {{\n'
    path.write_text(head + ",\n".join(lines) + "\n}}\n")


def differences(expected: dict, found: dict) -> list[str]:
    """What differs, a line each: to the last bit where the machine is the same, otherwise the losses of fp32 runs."""
    exact = expected["machine"] == found["machine"]
    cases, others = expected["cases"], found["cases"]
    lines = [f"{name}: only in one of the two" for name in sorted(cases.keys() ^ others.keys())]
    for name in sorted(cases.keys() & others.keys()):
        rounded = "bf16" in name or "8bit" in name
        lines += [f"{name}: {what}" for what in unequal(cases[name], others[name], exact or rounded, exact)]
    for one, other in SAME:
        if one in others and other in others:
            lines += [f"{one} is not {other}: {what}" for what in unequal(others[other], others[one], True, True)]
    return lines


def unequal(a, b, bits: bool, hashed: bool) -> list[str]:
    """Differences of two results: losses to the last bit or to ``REL``; of tensors, the names or the bits too."""
    if not (isinstance(a, dict) and "train" in a):
        return [] if a == b else [f"{a} and {b}"]
    if bits and not hashed:  # bf16 or 8 bits on another machine: nothing is promised
        return []
    found = []
    for kind, x, y in (("train", dict(enumerate(a["train"], 1)), dict(enumerate(b["train"], 1))),
                       ("eval", a["eval"], b["eval"])):  # fmt: skip
        if x.keys() != y.keys():
            found.append(f"{kind}: other steps")
        for step in [step for step in x if step in y and (bits or int(step) <= UPDATES)]:
            one, other = float.fromhex(x[step]), float.fromhex(y[step])
            if not (x[step] == y[step] if bits else math.isclose(one, other, rel_tol=REL)):
                found.append(f"{kind} loss of step {step}: {one:.9g} and {other:.9g}")
                break
    one, other = a["folded"], b["folded"]
    if len(one) != len(other) or one[:8] != other[:8]:
        found.append("tensors of other names")
    elif hashed and (wrong := [i // 8 for i in range(8, len(one), 8) if one[i : i + 8] != other[i : i + 8]]):
        found.append(f"{len(wrong)} of {len(one) // 8 - 1} folded tensors, the first is number {wrong[0]} by name")
    return found


def wrong_messages(tree: Path) -> list[str]:
    """Mistakes that the checkout answers otherwise than it should, a line each."""
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "corpus")
        write_corpus(corpus)
        with Commands(tree, Path(scratch, "commands")) as commands:
            return list(mistakes(commands, corpus, TOKENIZER, Path(scratch)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("record", "errors"):
        command = kinds.add_parser(kind)
        command.add_argument("--tree", type=Path, default=HERE.parent.parent, help="a checkout (default: this one)")
        if kind == "record":
            command.add_argument("output", type=Path)
            command.add_argument("--only", default="*", help="names of cases, with * and ?")
            command.add_argument("--workers", type=int, default=2, help="cases at once")
    command = kinds.add_parser("compare")
    command.add_argument("expected", type=Path)
    command.add_argument("found", type=Path)
    given = parser.parse_args()
    if given.kind == "record":
        started = time.monotonic()
        found = record(given.tree, given.only, given.workers)
        save(found, given.output)
        print(f"{len(found['cases'])} cases in {time.monotonic() - started:.0f} s: {given.output}")
        return 0
    if given.kind == "errors":
        lines = wrong_messages(given.tree)
    else:
        lines = differences(json.loads(given.expected.read_text()), json.loads(given.found.read_text()))
    print("\n".join(lines or ["no difference"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
