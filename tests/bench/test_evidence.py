"""The evidence page shows the measured numbers, and its commands are valid; so is the script of the GPU programme."""

import os
import re
import subprocess
import sys
import tarfile
import time
from zipfile import ZipFile

import pytest
from scipy.stats import t

from benchmarks import page
from benchmarks.evidence import geometry, report
from dlr_pretrain.cli import load
from dlr_pretrain.launch.runs import load_runs, read_table
from tests.conftest import ROOT, killed_with_its_group


def test_the_page_and_its_files_show_the_tables_of_runs():
    text, folder = report.PAGE.read_text(), report.PAGE.parent / "evidence"
    assert report.insert(text, report.HERE) == text
    linked = {folder / piece / f"{name}.{kind}" for piece, name, kind in report.linked_files(text)}
    assert linked == set(folder.glob("*/*")) - set(geometry.PACKED.glob("*"))
    for path in linked:
        assert path.suffix == ".png" or report.made(path.parent.name, path.stem, report.HERE).csv() == path.read_text()


def test_the_page_of_geometry_shows_its_numbers():
    text = geometry.PAGE.read_text()
    assert geometry.filled(text) == text
    assert all(f"evidence/geometry/{path.name}" in text for path in geometry.PACKED.glob("*.png"))


def test_the_page_of_gpu_results_is_written_from_their_table():
    assert page.page(page.read(page.TABLE)) == page.PAGE.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the script needs Linux")
def test_the_page_expects_something_of_each_measurement():
    listed = subprocess.run([SCRIPT, "out", "list"], capture_output=True, text=True, check=True).stdout
    measured = set(re.findall(r"^(\w) ([\w-]+):", listed, flags=re.MULTILINE)) - {("h", "tests")}
    assert measured and measured <= {(key, name) for key, (_, expected) in page.SLICES.items() for name in expected}


def test_the_intervals_of_a_table_hold_together():
    """Three differences with known p: 0.01, 0.02 and 0.04 become 0.03, 0.04 and 0.04."""
    values = {p: [t.ppf(1 - p / 2, 2) / 3**0.5 + x for x in (-1, 0, 1)] for p in (0.04, 0.01, 0.02)}
    effects = [{"method": str(p), "against": "plain", "by_seed": dict(enumerate(found))} for p, found in values.items()]
    found = report.together([*effects, effects[0]])  # repeated runs count once
    assert [round(d["p"], 6) for d in found] == [0.04, 0.03, 0.04, 0.04]
    assert {d["level"] for d in found} == {1 - (1 - 0.95) / 3} and {d["better"] for d in found} == {"plain"}


STUB = """#!/bin/sh
for word in "$@"; do
  case "$word" in /dev/fd/*) cat "$word" > "$SAID.$$"; word=$SAID.$$ ;; esac  # keep a copy of the table of runs
  printf "%s\\0" "$word" >> "$SAID"
done
echo >> "$SAID"
"""


@pytest.fixture
def commands(tmp_path):
    """The commands of train.sh by their script; each is written to a file instead of being run."""
    stub, said = tmp_path / "python", tmp_path / "said"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def of(*pieces: str, **given: str) -> dict[str, list[list[str]]]:
        said.write_text("")
        environment = os.environ | {"PYTHON": str(stub), "SAID": str(said)} | given
        subprocess.run([ROOT / "benchmarks" / "evidence" / "train.sh", *pieces], env=environment, check=True)
        found = {}
        for script, *words in (line.split("\0")[:-1] for line in said.read_text().splitlines()):
            found.setdefault(script, []).append(words)
        return found

    return of


@pytest.mark.full
def test_every_command_of_the_programme_composes(commands, tmp_path):
    for words, given in (
        ("data=c4 ", {}),
        ("data.root=texts", {"TEXT": "texts"}),
        ("tokenizer.path=m", {"SPIECE": "m"}),
    ):
        for piece in ("tokens", "smoke"):
            (prepared,) = commands(piece, **given)["scripts/prepare_data.py"]
            assert words in " ".join(prepared)
            load([word for word in prepared if word.startswith(("data", "tokenizer"))], machine=False)
    assert len({load(words, machine=False).run.dir for words in commands("smoke")["train.py"]}) == 4
    tuned = commands(TEXT="texts")["slurm/submit.py"]
    assert len(tuned) == 31 and len({words[words.index("--report") + 1] for words in tuned}) == 31
    for words in tuned:
        table = [word for word in words if "=" in word or word.startswith(str(tmp_path))]
        load_runs(read_table(table)[-1:])


# ----------------------------------------------------------------------------------------------------
# The script of the GPU programme, where it needs no GPU


SCRIPT = ROOT / "benchmarks" / "gpu.sh"


@pytest.mark.skipif(sys.platform != "linux", reason="the script needs Linux")
def test_no_measurement_outlives_a_killed_script(tmp_path):
    stub, began = tmp_path / "python", tmp_path / "began"
    stub.write_text(f"#!/bin/sh\n[ $1 = -c ] || {{ touch {began}; exec sleep 600; }}\n")  # -c asks for a GPU
    stub.chmod(0o755)
    given = {"PYTHON": str(stub), "PACK": str(tmp_path / "none")}
    command = [SCRIPT, tmp_path / "out", "g"]
    script = subprocess.Popen(command, env=os.environ | given, stdin=subprocess.PIPE, start_new_session=True)
    while not began.exists():
        assert script.poll() is None
        time.sleep(0.01)
    assert killed_with_its_group(script, 60_000), "its standard input is still open in a process that it started"


@pytest.mark.skipif(sys.platform != "linux", reason="the script needs Linux")
def test_a_pack_that_is_too_large_for_a_slice_is_refused(tmp_path):
    for part, size in {"wheels/a": 4, "tf448/a": 13, "peers/a": 46, "tokens.tar.xz": 60}.items():
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).touch()
        os.truncate(tmp_path / part, size << 20)
    found = subprocess.run([SCRIPT, "sizes", tmp_path], capture_output=True, text=True)
    assert found.returncode == 1
    assert re.findall(r"slice (\w): 65 MiB of .* must be less than 64", found.stderr) == ["g", "e", "f", "h"]


@pytest.mark.skipif(sys.platform != "linux", reason="the script needs Linux")
def test_a_pack_is_unpacked_before_anything_is_measured(tmp_path):
    pack, about = tmp_path / "pack", "thing-1.dist-info"
    (pack / "wheels").mkdir(parents=True)
    with ZipFile(pack / "wheels" / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    with tarfile.open(pack / "tokens.tar.xz", "w:xz") as tokens:
        tokens.add(__file__, "manifest.json")
    given = {"PYTHON": sys.executable, "PACK": str(pack), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run([SCRIPT, tmp_path / "out", "g"], env=os.environ | given).returncode == 2  # without a GPU
    unpacked = tmp_path / f"dlr_pretrain_pack.{os.getuid()}"
    assert (unpacked / "wheels" / "thing.py").exists() and (unpacked / "tokens" / "manifest.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the script needs Linux")
def test_each_backbone_has_an_interval_of_its_pairs():
    """Over rates and seeds, at the same number of tokens; a lone pair has none."""
    about = {"text": "c4", "commit": "0"}
    runs = [
        about | {"method": [backbone, dlr], "lr": lr, "seed": seed, "losses": [[1e6, 5.0], [tokens, loss]]}
        for backbone, lr, seed, tokens, difference in (
            *(("cola", lr, seed, 2e6, -seed / 10) for lr in (0.003, 0.01) for seed in (1, 2)),
            ("lost", 0.003, 1, 2e6, 0.5),
        )
        for dlr, loss in (("off", 4.0), ("on", 4.0 + difference))
    ]
    assert page.losses(runs, "").splitlines()[-2:] == [
        "| cola | 2.0M | 4 | -0.1500 | -0.2419 to -0.0581 |",
        "| lost | 2.0M | 1 | +0.5000 |  |",
    ]
