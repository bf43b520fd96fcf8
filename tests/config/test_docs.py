"""What the pages say stands in the code: links lead somewhere, and programs take the commands that are shown.

A command's flags are in the program's help, and its overrides compose. ``-m full`` executes it at ``scale=tiny``.
The files of docs/extending.md are written, and its commands train, resume, fold and reload.
"""

import gzip
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from functools import cache
from html.parser import HTMLParser
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from tokenizers import ByteLevelBPETokenizer

from dlr_pretrain.cli import load
from dlr_pretrain.config.command_line import check, read
from dlr_pretrain.launch.runs import expand
from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT, commands
from tests.golden.regenerate import golden

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
NOTEBOOK = ROOT / "docs" / "first_model.ipynb"
COMMANDS = commands("README.md", "docs/*.md", "benchmarks/README.md", but=("docs/extending.md",))
PROGRAM = re.compile(r"\.(py|sh|sbatch)$")
OVERRIDES = ("train", "plan", "doctor", "prepare_data", "benchmarks")  # programs whose other words are overrides


class Html(HTMLParser):
    """A page: what it links to or shows, where links may lead in it, and its text outside of code."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.anchors, self.text, self.heading, self.code = set(), set(), "", None, 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links |= {given.get("href"), given.get("src"), *re.split(r"[\s,]+", given.get("srcset") or "")}
        self.anchors.add(given.get("id"))
        self.heading = "" if re.fullmatch("h[1-6]", tag) else self.heading
        self.code += tag == "code"

    def handle_data(self, data):
        self.text += "" if self.code else data
        if self.heading is not None:
            self.heading += data

    def handle_endtag(self, tag):
        self.code -= tag == "code"
        if re.fullmatch("h[1-6]", tag):  # an anchor as GitHub makes it of a heading
            slug = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
            numbered = (f"{slug}-{n}" if n else slug for n in count())
            self.anchors.add(next(anchor for anchor in numbered if anchor not in self.anchors))
            self.heading = None


@cache
def rendered(path: Path) -> Html:
    """A page as GitHub renders it; of a notebook, its text."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return Html(MarkdownIt("commonmark").enable("table").render(text))


@pytest.mark.parametrize("path", [*PAGES, *OTHER_PAGES, NOTEBOOK], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    page = rendered(path)
    assert not (dead := re.findall(r".*\]\[.*|\[[\w.-]+\]:.*", page.text)), f"links without a definition: {dead[:3]}"
    for link in filter(None, page.links):
        if re.match(r"\w+:", link):
            assert re.match(r"https://[\w.-]+\.\w+(/\S*)?$|mailto:", link), link
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / unquote(name)).resolve() if name else path
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in rendered(target).anchors, link


@pytest.mark.full
def test_every_link_of_the_site_leads_somewhere(tmp_path):
    """Also pictures in HTML, of which mkdocs looks at none."""
    pytest.importorskip("material", reason='the site needs pip install -e ".[docs]"')
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = {path: Html(path.read_text()) for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert tmp_path / page.parent.relative_to(ROOT) / name in site
    for path, html in site.items():
        for link in filter(None, html.links):
            if not re.match(r"\w+:", link):
                name, _, anchor = link.partition("#")
                target = (path.parent / name).resolve() if name else path
                assert target.exists(), (path, link)
                assert not anchor or target not in site or anchor in site[target].anchors, (path, link)
    assert "Duplicated Latent Residuals" in (tmp_path / "search" / "search_index.json").read_text()


@pytest.mark.full
def test_the_notebook_runs(tmp_path):
    """Its cells in order, with fewer steps. A line with ``!`` is a command, as Jupyter reads it."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    command = r'subprocess.run(rf"""\1""", shell=True, check=True)'
    code = "import subprocess\n" + re.sub(r"^!((?:.*\\\n)*.*)$", command, code, flags=re.MULTILINE)
    shorter = code.replace("train.steps=150 eval.every=25", "train.steps=10 eval.every=5")
    assert shorter != code
    (tmp_path / "docs").mkdir()
    for name in ("train.py", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    own = {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = [sys.executable, "-c", shorter]
    done = subprocess.run(python, cwd=tmp_path / "docs", env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("nats per token of this sentence")


def program(words: list[str]) -> int:
    """Where the program stands among the words of a command: behind python, sbatch or torchrun and their options."""
    return next(i for i, w in enumerate(words) if (PROGRAM.search(w) and "launch.py" not in w) or words[i - 1] == "-m")


@cache
def flags(name: str, is_module: bool) -> set[str]:
    """The flags in a program's help, asked in this process."""
    said = io.StringIO()
    with redirect_stdout(said), patch("sys.argv", [name, "--help"]), pytest.raises(SystemExit, match="0"):
        runpy.run_module(name, run_name="__main__") if is_module else runpy.run_path(ROOT / name, run_name="__main__")
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", said.getvalue()))


OTHERS = r"git |pip |hf |wandb |python3? -m (pytest|venv)"
FIRST = commands("README.md", "docs/tutorial.md", "docs/runs.md", "docs/slurm.md")


@pytest.mark.parametrize("command", [
    command if command in FIRST else pytest.param(command, marks=pytest.mark.full)
    for command in COMMANDS if not re.match(OTHERS, command)
])  # fmt: skip
def test_a_command_is_understood(command):
    words = shlex.split(command)
    at = program(words)
    name, rest = words[at], words[at + 1 :]
    rest = rest[: rest.index("--")] if "--" in rest else rest  # what follows is sbatch's
    if name.endswith(".sh"):
        listed = subprocess.run(
            ["bash", ROOT / name, *rest, "list"], stdout=subprocess.DEVNULL
        )  # a pipe would stay open
        assert listed.returncode == 0
        return
    own = [word for word in rest if not word.startswith("-")]
    if not name.endswith("train.sbatch") and Path(name).stem != "train":
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= flags(name, words[at - 1] == "-m")
    else:
        own = rest
    if Path(name).stem in OVERRIDES:
        mappings = [word for word in own if "={" in word]
        composes(mappings + [word for word in own if " " not in word and ("=" in word or word.startswith("-"))])


def composes(words: list[str]) -> None:
    """What ``train.py`` checks first; of a sweep, its first and its last run. Such as ``--help`` asks for no more."""
    line = read(words)
    assert line.problems == []
    if line.multirun:
        runs = expand([word for word in words if word != "-m"])
        for of in (runs[0], runs[-1]):
            composes(list(of.words))
    elif "--help" not in words:
        check(line, None, machine=False)


def test_every_program_of_the_installation_is_there():
    """Also of an editable one, which finds a folder as a part of the package only if it is a package itself."""
    installed = [found for found in distributions(name="dlr-pretrain") if found.read_text("direct_url.json")]
    assert all(callable(program.load()) for found in installed for program in found.entry_points)
    assert installed or pytest.skip("pip has not installed dlr_pretrain here")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_diagram_is_what_its_script_draws(theme):
    draw = runpy.run_path(ROOT / "docs/diagram.py")["draw"]
    drawn = (ROOT / f"docs/images/method-{theme}.svg").read_text(encoding="utf-8")
    assert drawn == draw(theme), "python docs/diagram.py"


# Commands that another test executes, or that need a GPU, SLURM, a network or a program of others.
NOT_HERE = (
    r"^(git|pip|hf|wandb|sbatch|srun|python3? -m (pytest|venv)) | -- |--local|--confirm|--nnodes"  # tests/slurm
    r"|scripts\.(paper|geometry)|hydra/"  # below, test_command_line.py, tests/unit/scripts
    r"|benchmarks|evaluate\.py|sft|push"  # tests/bench, tests/deploy, tests/unit/deploy
)
SMALL = {
    **{"scale.hidden_size": 128, "scale.intermediate_size": 172, "scale.num_heads": 2, "scale.num_layers": 2},
    **{"scale.vocab_size": "null", "train.seq_len": 16, "train.global_batch": 8, "eval.tokens": 200, "data": "sample"},
    **{"precision": "fp32", "compile": "false", "logger": "jsonl", "device": "cpu"},
}
RELORA = {"backbone.merge_every": 1, "backbone.restart_warmup": 0, "train.warmup_steps": 0}
STEPS = re.compile(r"((?:train\.(?:steps|lr_decay_steps|warmup_steps)|checkpoint\.keep_every)=|/step_)(\d+)")


def shrunk(command: str) -> list[str]:
    """A command for one process on a CPU: a small model, a 5,000th of the steps, and the name of the page's own run."""
    words = shlex.split(re.sub(r"(?<=[ =])/data/", "data/", command))
    at = program(words)
    name, own = words[at], words[at + 1 :]
    shorter = 10 if "scale=tiny" in own else 5_000
    if Path(name).stem in ("train", "submit", "doctor"):
        given = {word.partition("=")[0] for word in own}
        small = SMALL | {"checkpoint.every": 10 if shorter == 10 else 2}
        small |= {} if re.search("backbone=full|galore|backbone.rank", command) else {"scale.rank": 8}
        if name == "train.py" and "-m" not in own:
            cfg = load(own, None, machine=False)
            small |= {"run.dir": cfg.run.dir, "train.steps": cfg.train.steps} | (RELORA if "relora" in command else {})
        own += [f"{key}={value}" for key, value in ({"train.steps": 6 * shorter} | small).items() if key not in given]

    def fewer(of: re.Match) -> str:
        return of[1] + str(min(int(of[2]), max(2, int(of[2]) // shorter))).zfill(len(of[2]) if of[2][0] == "0" else 1)

    return [name, *(STEPS.sub(fewer, word) for word in own)]


def executed(words: list[str], folder: Path, code: str = "") -> tuple[int | None, str]:
    """The exit code and the output of a program, or of ``code``, in a fork of this process, which has its imports."""
    with tempfile.TemporaryFile("w+") as output:

        def start() -> None:
            os.chdir(folder)
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.argv = words
            exec(code, {"__name__": "snippet"}) if code else runpy.run_path(str(ROOT / words[0]), run_name="__main__")

        child = multiprocessing.get_context("fork").Process(target=start)
        child.start()
        child.join()
        output.seek(0)
        return child.exitcode, output.read()


@pytest.mark.full
def test_commands_and_snippets_run(tmp_path, corpus):
    """In the order of the site, in one folder, because a page uses what an earlier one has made."""
    for module in ("train.run", "analysis.report", "deploy.modeling_lowrank_llama"):
        importlib.import_module(f"dlr_pretrain.{module}")  # once, instead of in every fork
    (tmp_path / "data/c4").mkdir(parents=True)
    (tmp_path / "texts").mkdir()
    for name in ("data/c4/en", "my_text", "texts/web", "texts/code", "texts/wiki"):
        (tmp_path / name).symlink_to(corpus)
    for folder in (tmp_path, tmp_path / "data"):
        shutil.copy(corpus / "spiece.model", folder)
    (tmp_path / "my.runs").write_text("backbone=cola dlr=on\n")
    learned = ByteLevelBPETokenizer()
    with gzip.open(corpus / "c4-train.00000-of-00002.json.gz", "rt") as file:
        learned.train_from_iterator(file, vocab_size=300, special_tokens=["</s>"])
    learned.save(str(tmp_path / "tokenizer.json"))
    failed = []
    pages = [f"docs/{name}.md" for name in ("recipes", "tutorial", "runs", "reports", "deploy", "slurm")]
    executed(shrunk("train.py scale=1b backbone=lowrank dlr=on"), tmp_path)  # docs/deploy.md folds it
    for page in ("README.md", *pages):
        own = [line for line in commands(page) if not re.search(NOT_HERE, line)]
        snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        snippets = [code.replace("<name>", "1b-cola-dlr_on-s42") for code in snippets if "cola/" not in code]
        for line, code in [*((line, "") for line in own), *(("", code) for code in snippets)]:
            status, said = executed(shrunk(line) if line else [], tmp_path, code)
            print(f"{page}: {line or code}\n{said}")
            if status or "Traceback" in said or (code and re.search(r"\.\.\.(\s|$)", said)):
                failed.append((page, line or code, said[-1500:]))
    assert not failed, failed


def test_the_pictures_of_runs_are_of_this_code():
    """``make images`` draws them: after a change that moves the golden curves, and after one of the figures."""
    numbers = json.loads((ROOT / "docs/images/numbers.json").read_text())
    assert numbers["golden"] == {name: golden()[name][-1] for name in numbers["golden"]}
    for picture, shown in numbers["pictures"].items():
        assert hashlib.sha256((ROOT / "docs/images" / picture).read_bytes()).hexdigest() == shown["sha256"], picture
        assert set(shown["commands"]) <= set(COMMANDS) and shown["runs"]


@pytest.mark.full
def test_the_first_command_gives_the_losses_of_its_picture(tmp_path):
    numbers = json.loads((ROOT / "docs/images/numbers.json").read_text())
    if numbers["python"] != platform.python_version():
        pytest.skip("the sample is the text of another Python")
    shown = numbers["pictures"]["first-run.png"]
    ((name, run),) = shown["runs"].items()
    words = shlex.split(shown["commands"][0])[1:]
    status, said = executed([*words, "device=cpu", f"train.stop_after={len(run['losses'])}"], tmp_path)
    assert status == 75, said
    losses = [record["train/loss"] for record in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")]
    assert losses == pytest.approx(run["losses"], abs=1e-3)


@pytest.mark.full
def test_the_commands_of_the_papers_page_run(tmp_path, monkeypatch):
    """Those of --submit are dry. Those that train (--local) are what the rehearsal of all items runs."""
    from scripts.paper import items as paper
    from scripts.paper.__main__ import main

    load_each, loaded = paper.load_each, {}

    def load_once(lines, machine=False):
        words = tuple(line.words for line in lines)
        return loaded[words] if words in loaded else loaded.setdefault(words, load_each(lines, machine))

    monkeypatch.setattr(paper, "load_each", load_once)
    monkeypatch.chdir(tmp_path)
    for command in commands("docs/reproduce.md"):
        if "--local" not in command:
            words = shlex.split(re.sub("--submit(?! --dry)", "--submit --dry-run", command))[3:]
            assert main(words) == 0, command
    pages = tmp_path / "runs" / "paper" / "reproduce.html"
    assert pages.exists() and "not started" in pages.read_text()


# ----------------------------------------------------------------------------------------------------
# docs/extending.md, followed to the letter


PAGE = (ROOT / "docs" / "extending.md").read_text()
LOOP = "dlr_pretrain/train/loop.py"


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A user's own folder, with the files of the page."""
    folder = tmp_path_factory.mktemp("own")
    files = re.findall(r"^`([\w/.]+/[\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(files) == 7
    for name, text in files:
        assert name.startswith(("my_package/", "my_configs/"))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A copy of the code with the page's metric."""
    folder = tmp_path_factory.mktemp("measured")
    for name in ("configs", "dlr_pretrain"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    (metric,) = re.findall(r"```python\n( +with .*?)```", PAGE, flags=re.DOTALL)
    used = "from dlr_pretrain.models.residual import entries\nfrom dlr_pretrain.train.parallel import norm_of\n"
    evaluates, loop = "record = record | (metrics or {})\n", (folder / LOOP).read_text()
    assert loop.count(evaluates) == 1
    loop = loop.replace(evaluates, evaluates + metric).replace(
        "from dlr_pretrain.config", f"{used}from dlr_pretrain.config"
    )
    (folder / LOOP).write_text(loop)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("of", ["gelu", "lion"])
def test_what_the_page_adds_trains_resumes_and_is_exported(of, own, measured, corpus):
    (line,) = [
        line
        for line in "".join(re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)).splitlines()
        if f"={of}" in line
    ]
    data = f"data=c4_local data.root={corpus} tokenizer.path={corpus}/spiece.model eval.tokens=500"
    run = own / "runs" / of
    variable, _, train, *words = shlex.split(line.replace("data=sample", data))
    assert (variable, train) == ("PYTHONPATH=.", "train.py")
    command = [sys.executable, str(measured / train), *words, f"run.dir={run}", "train.seq_len=16", "train.steps=6"]
    environment = os.environ | {"PYTHONPATH": f"{measured}:.", "OMP_NUM_THREADS": "1"}
    for more, code in (["train.stop_after=3"], 75), ([], 0):
        done = subprocess.run([*command, *more], cwd=own, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "transformers loads it" in done.stdout
    records = list(read_metrics(run / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 7)) and records[-1]["weights/b_norm"] > 0
    settings = json.loads((run / "folded" / "config.json").read_text())
    assert settings["num_hidden_layers"] == 2 and settings["backbone"] == ("gelu" if of == "gelu" else "cola")
    # transformers runs the code of the folder, without the user's package
    load = (
        "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    load += "; m.save_pretrained(sys.argv[2]); t.AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True)"
    environment = os.environ | {"HF_MODULES_CACHE": str(own / "modules" / of)}
    places = run / "folded", own / "again" / of
    done = subprocess.run([sys.executable, "-c", load, *places], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
