"""Writes benchmarks/gpu.md, the page of GPU results, from the results of ``gpu.sh``.

    python -m benchmarks.page results/gpu     # adds that folder to gpu.jsonl.gz, and writes the page from it
    python -m benchmarks.page                 # writes the page again

Each line of gpu.jsonl.gz is a result: its slice, its name, and what ``--json`` wrote. A result that the folder lacks is
kept. The lines named runs hold the varying settings and the evaluations of their runs.
"""

import argparse
import gzip
import json
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import yaml
from scipy.stats import ttest_1samp

from benchmarks import results
from benchmarks.evidence.collect import write
from dlr_pretrain.util.text import markdown_table

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "gpu.jsonl.gz", HERE / "gpu.md"
PAPER = "On - off as in the paper, with a wider interval: on 31 times the tokens, {}."
SLICES: dict[str, tuple[str, dict[str, str]]] = {  # the results of each slice, with what was expected of them
    "g": (
        "Launches, recorded micro-batches, attention, fp8",
        {
            "launches": "36 to 48 µs a launch from Python on a host as that of slice a; below 3 µs from a graph.",
            "few-60m": "14 ms as CUDA graphs; 20 to 23 without.",
            "few-1b": "41 ms as CUDA graphs; 69.8 without.",
            "step-1b": "One micro-batch: 134 ms, 123 with `attention=triton` (138.8 in slice a). Four: 150 ms as CUDA "
            "graphs; 257 without.",
            "step-60m": "85 to 88 ms, because rotary embedding and loss are written anew and blocks are compiled one "
            "by one (103.9 in slice a); 78 with `attention=triton`.",
            "step-60m-masked": "With `attention=triton`, document masks cost nothing; without it, 14 to 16 %.",
            "step-60m-fast-math": "Up to 2 % less than `step-60m`.",
            "attention": "8 to 10 ms less per update of 60m, and 11 of 1b, than cuDNN's kernel with a rotary embedding "
            "before it.",
            "fp8": "No gain with casts where a rank of 128 or 512 is a side of the product; 1.2 to 1.5 for the head.",
            "train-60m": "At least 98 % of the tokens/s of `step-60m`.",
            "train-60m-fsdp": "CUDA graphs are faster: on one rank the host launches more than without FSDP.",
            "memory-7b": "Within 5 % of the plan, as the eager step was with AdamW.",
        },
    ),
    "a": (
        "One card, and our step",
        {
            "card": "790 TFLOP/s for products of 8,192^3 in bf16, as on an H200.",
            "step-1b": "110 ms, an eighth of 882; 45 to 55 % of the data sheet's peak. DLR on / off 1.000.",
            "step-60m": "76 ms; 27 to 33 % of the data sheet's peak. DLR on / off below 1.003.",
        },
    ),
    "b": (
        "Beside other code",
        {
            "cola-60m": "CoLA's step 2 to 3 times ours.",
            "cola-1b": "CoLA's step 1.7 to 2.3 times ours.",
            "dlr-60m": "The authors' step 1.4 times ours, as on a CPU.",
            "dlr-1b": "The authors' step 1.2 to 1.4 times ours: products are a larger share than at 60m.",
            "dense-60m": "The LLaMA of transformers 1.2 to 1.4 times ours.",
        },
    ),
    "d": (
        "Compiling",
        {
            "cold": "At most 25 s for each scale: blocks of a kind share their graphs.",
            "warm": "At most 10 s for each scale.",
        },
    ),
    "e": ("60m on real text: cola, lowrank", {"runs": PAPER.format("-0.034 for cola, -0.003 for lowrank")}),
    "f": (
        "60m on real text: lost, lax, cola_lax",
        {"runs": PAPER.format("+0.028 for lost, +0.005 for lax, +0.049 for cola_lax")},
    ),
    "h": ("60m on four times the text", {"runs": "The same sign as in slice e."}),
}
KINDS = {  # of kernels, by their names: the first that fits; those of the optimizer also compute the gradient's norm
    "attention": "sdpa|cudnn::fusion|flash|fmha|^attention_",
    "products": "nvjet|gemm|cutlass|splitK",
    "fused": "^triton",
    "optimizer": "multi_tensor_apply",
    "copies": "^Memcpy",
}
HEAD = """# What was measured on a GPU

`python -m benchmarks.page` writes this page from `gpu.jsonl.gz`; `benchmarks/gpu.sh` measures. [Benchmarks](README.md)
explains how, and what was expected. In a row marked *unchecked*, the losses have not been compared yet.

A table of kernels is of one traced update. It sorts the 30 kernels that took longest in all. The others are in the
column *other*; a blank kind is not among the 30. Attention by plain products, as in CoLA's step, counts as products.
"""


def collected(folder: Path) -> Iterator[dict]:
    for piece in sorted(folder.glob("[a-h]/*.json")):
        found = json.loads(piece.read_text())
        found["command"] = re.sub(r" --json \S+", "", found["command"])  # the path means nothing on another machine
        yield {"slice": piece.parent.name, "name": piece.stem} | found
    for archive in sorted(folder.glob("[efh]/runs.tgz")):
        yield {"slice": archive.parent.name, "name": "runs", "runs": list(runs_in(archive))}


def runs_in(archive: Path) -> Iterator[dict]:
    """Yields the settings and evaluation losses of each run in an archive."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getnames()):
            if not member.endswith("/metrics.jsonl"):
                continue
            folder = member.removesuffix("metrics.jsonl")
            config = yaml.safe_load(files.extractfile(f"{folder}config.yaml"))
            lines = files.extractfile(member).read().decode().splitlines(keepends=True)
            records = [json.loads(line) for line in lines if line.endswith("\n")]
            start = json.loads(files.extractfile(f"{folder}manifest.json").read())["starts"][-1]
            yield {
                "method": [config[key]["name"] for key in ("backbone", "dlr")],
                "lr": config["train"]["lr"],
                "seed": config["seed"],
                "text": config["data"]["source"],
                "commit": start["git"] or "unknown",
                "losses": [[r["train/tokens"], r["eval/loss"]] for r in records if r.get("eval/loss") is not None],
            }


def page(found: Sequence[dict]) -> str:
    by_place = {(line["slice"], line["name"]): line for line in found}
    parts = [HEAD]
    for key, (title, expected) in SLICES.items():
        parts.append(f"## {key}. {title}\n")
        measured = {name: by_place[key, name] for name in expected if (key, name) in by_place}
        parts += [section(name, line, expected[name]) for name, line in measured.items()]
        if missing := [[f"`{name}`", text] for name, text in expected.items() if name not in measured]:
            parts.append(markdown_table(["not measured", "expected"], missing) + "\n")
    return "\n".join(parts)


def section(name: str, line: dict, expected: str) -> str:
    """The Markdown of one result, with what was ``expected``, its command, machine, versions and commit."""
    if "runs" in line:
        return losses(line["runs"], expected)
    part = line["command"].split()[3]
    facts = [line.get("device"), line["machine"], f"Python {line['python']}", line["versions"]]
    commits = f"commit {short(line['commit'])}"
    if line.get("checked_at", line["commit"]) != line["commit"]:
        commits += f", losses compared at {short(line['checked_at'])}"
    batch = line.get("batch", {})
    shape = ""
    if batch:
        rounds = max(len(variant.get("seconds", [])) for variant in line["variants"])
        shape = f"{batch['rows']} x {batch['seq_len']} tokens, {rounds} rounds. "
    tables = {"step": results.STEPS, "compare": results.STEPS, "memory": results.MEMORY}
    tables["train"] = results.TRAINING
    shown = [results.table(tables.get(part, results.CARD), [v for v in line["variants"] if "positions" not in v])]
    if part == "card":
        shown.append(products([v for v in line["variants"] if "positions" in v]))
    if traced := [variant for variant in line["variants"] if variant.get("traced")]:
        shown.append(kernels(traced))
    about = f"{shape}{', '.join(fact for fact in facts if fact)}; {commits}."
    if note := line.get("note"):
        shown.append(note)
    head = f"### {name}\n\nExpected: {expected}"
    return "\n".join((head, "", about, "", f"`{line['command']}`", "", "\n\n".join(shown), ""))


def products(rows: list[dict]) -> str:
    """The TFLOP/s of each matrix product, with a column for each number of positions."""
    counts = sorted({row["positions"] for row in rows})
    speed = {(row["name"], row["positions"]): f"{row['flops_per_second'] / 1e12:.4g}" for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    cells = [[name, *(speed.get((name, count), "") for count in counts)] for name in names]
    return markdown_table(["TFLOP/s, positions", *(f"{n:,}" for n in counts)], cells, right=range(1, len(counts) + 1))


def kernels(variants: list[dict]) -> str:
    """The time of one traced update's kernels, by kind."""
    rows = []
    for variant in variants:
        found = variant["traced"]
        times = dict.fromkeys(KINDS, 0.0)
        for name, _, ms in found["longest"]:
            if kind := next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), None):
                times[kind] += ms
        other = max(0.0, found["busy_ms"] - sum(times.values()))
        shown = [f"{ms:.1f}" if ms else "" for ms in (*times.values(), other, found.get("calls_ms"))]
        rows.append([variant["name"], *shown, str(found["kernels"])])
    header = ["ms of kernels", *KINDS, "other", "host, in CUDA's calls", "number of kernels"]
    return markdown_table(header, rows, right=range(1, len(header)))


def short(commit: str) -> str:
    """The first nine digits, and the "+" of local changes."""
    return commit[:9] + "+" * commit.endswith("+")


def losses(runs: list[dict], expected: str) -> str:
    """The losses of each pair of runs with and without DLR, at the last evaluation that both have, and the mean
    difference of each backbone's pairs."""
    by_key = {(*run["method"], run["lr"], run["seed"]): dict(run["losses"]) for run in runs}
    groups: dict[tuple, list[tuple]] = {}
    for (backbone, dlr, lr, seed), off in by_key.items():
        on = by_key.get((backbone, "on", lr, seed), {})
        if dlr == "off" and (shared := off.keys() & on.keys()):
            groups.setdefault((backbone, lr, max(shared)), []).append((off[max(shared)], on[max(shared)], seed))
    rows, differences = [], {}
    for (backbone, lr, tokens), pairs in sorted(groups.items()):
        offs, ons, seeds = zip(*pairs, strict=True)
        apart, reached = [on - off for off, on, _ in pairs], f"{tokens / 1e6:.1f}M"
        differences.setdefault((backbone, reached), []).extend(apart)
        means, shown = [f"{mean(losses):.4f}" for losses in (offs, ons)], ", ".join(f"{d:+.4f}" for d in apart)
        rows.append([backbone, f"{lr:g}", reached, str(len(seeds)), *means, shown])
    effects = []
    for place, apart in differences.items():
        interval = "{:+.4f} to {:+.4f}".format(*ttest_1samp(apart, 0).confidence_interval(0.95)) if apart[1:] else ""
        effects.append([*place, str(len(apart)), f"{mean(apart):+.4f}", interval])
    about = "No run has begun."
    if runs:
        texts, commits = ({run[key] for run in runs} for key in ("text", "commit"))
        about = f"{len(runs)} runs, text {', '.join(sorted(texts))}, commit {', '.join(map(short, sorted(commits)))}."
    header = ["backbone", "lr", "tokens", "seeds", "loss, DLR off", "on", "on - off, each seed"]
    table = markdown_table(header, rows, right=range(1, 7))
    header = ["backbone", "tokens", "pairs", "on - off, mean", "95 % interval"]
    together = markdown_table(header, effects, right=range(1, 5))
    note = "Pairs have the same rate and seed. Intervals are Student's, as if pairs of one seed were independent."
    return "\n\n".join(("### runs", f"Expected: {expected}", about, table, note, together)) + "\n"


def read(table: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(table.read_bytes()).splitlines()] if table.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.page", description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="a folder of gpu.sh results to add to the table")
    found = {(line["slice"], line["name"]): line for line in read(TABLE)}
    for folder in parser.parse_args().folders:
        new = {(line["slice"], line["name"]): line for line in collected(Path(folder))}
        if any("rehearsal" in line for line in new.values()):
            sys.exit(f"error: {folder} is a rehearsal: its numbers mean nothing")
        found |= new
    if found:
        write((found[key] for key in sorted(found)), TABLE)
    PAGE.write_text(page(list(found.values())))


if __name__ == "__main__":
    main()
