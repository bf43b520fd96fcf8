"""Makes the pictures of README.md and docs/ by the commands on their pages: ``make images``.

Runs and reports are in results/images; one that is finished there is not trained again. images/numbers.json has the
runs of each picture, their first losses and perplexities, and the last losses of the golden runs, which tell the code.
"""

import hashlib
import json
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from dlr_pretrain.analysis.runs import read_runs
from tests.conftest import commands
from tests.golden.regenerate import golden

ROOT = Path(__file__).parent.parent
IMAGES, WORK = ROOT / "docs/images", ROOT / "results/images"
FIRST = 20  # losses of a run that are kept
GOLDEN = ("cola", "cola+dlr")
README_RUN = "runs/tiny-cola-dlr_on-sample-fp32-s42"
# A picture, the page that shows it, the file that the commands of the page write, and the runs in it.
PICTURES = (
    ("first-run.png", "README.md", f"{README_RUN}/plots/loss.png", README_RUN),
    ("report.png", "docs/reports.md", "report/figures/loss_tokens_tiny.png", "runs/tiny-cola_lax-*"),
)


def shown(page: str) -> list[str]:
    """The commands of ``page`` that train or report runs of this machine's sample."""
    of_sample = [line for line in commands(page) if line.startswith("python train.py") and "data=sample" in line]
    return [*of_sample, *(line for line in commands(page) if "report.py 'runs/tiny" in line)]


def main() -> None:
    runpy.run_path(str(ROOT / "docs/diagram.py"), run_name="__main__")
    WORK.mkdir(parents=True, exist_ok=True)
    for name in ("train.py", "scripts"):
        (WORK / name).unlink(missing_ok=True)
        (WORK / name).symlink_to(ROOT / name)
    pictures = {}
    for picture, page, made, runs in PICTURES:
        for line in shown(page):
            print(f"{page}: {line}", flush=True)
            words = [sys.executable, *shlex.split(line)[1:]]
            subprocess.run(words, cwd=WORK, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        shutil.copy(WORK / made, IMAGES / picture)
        read = read_runs([str(WORK / runs)])
        of_runs = {}
        for run in read.runs.itertuples():
            losses = read.metrics[read.metrics.run == run.run]["train/loss"].head(FIRST)
            of_runs[run.name] = {"ppl": round(run.ppl, 2), "losses": [round(loss, 4) for loss in losses]}
        digest = hashlib.sha256((IMAGES / picture).read_bytes()).hexdigest()
        pictures[picture] = {"sha256": digest, "commands": shown(page), "runs": of_runs}
    of_code = {"python": platform.python_version(), "golden": {name: golden()[name][-1] for name in GOLDEN}}
    text = json.dumps(of_code | {"pictures": pictures}, indent=1)
    (IMAGES / "numbers.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
