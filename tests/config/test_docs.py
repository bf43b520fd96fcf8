"""What the pages say stands in the code: links lead somewhere, and programs take the commands that are shown.

A command's flags are in the program's help, and its overrides compose. docs/extending.md has a test of its own.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
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

from dlr_pretrain.config.command_line import check, read
from dlr_pretrain.launch.runs import expand
from tests.conftest import ROOT, commands

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
@pytest.mark.slow
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


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if not re.match(r"git |pip |hf |wandb |python3? -m (pytest|venv)", c)]
)
def test_a_command_is_understood(command):
    words = shlex.split(command)
    at = program(words)
    name, rest = words[at], words[at + 1 :]
    rest = rest[: rest.index("--")] if "--" in rest else rest  # what follows is sbatch's
    if name.endswith(".sh"):
        assert subprocess.run(["bash", ROOT / name, *rest, "list"], capture_output=True).returncode == 0
        return
    own = [word for word in rest if not word.startswith("-")]
    if not name.endswith("train.sbatch") and Path(name).stem != "train":
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= flags(name, words[at - 1] == "-m")
    else:
        own = rest
    if Path(name).stem in OVERRIDES:
        composes([word for word in own if " " not in word and ("=" in word or word.startswith("-"))])


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


@pytest.mark.full
@pytest.mark.slow
def test_the_commands_of_the_papers_page_run(tmp_path, monkeypatch):
    """Those of --submit are dry. Those that train (--local) are what the rehearsal of all items runs."""
    from scripts.paper import items as paper
    from scripts.paper.__main__ import main

    load, loaded = paper.load_each, {}

    def load_once(lines, machine=False):
        words = tuple(line.words for line in lines)
        return loaded[words] if words in loaded else loaded.setdefault(words, load(lines, machine))

    monkeypatch.setattr(paper, "load_each", load_once)
    monkeypatch.chdir(tmp_path)
    for command in commands("docs/reproduce.md"):
        if "--local" not in command:
            words = shlex.split(re.sub("--submit(?! --dry)", "--submit --dry-run", command))[3:]
            assert main(words) == 0, command
    pages = tmp_path / "runs" / "paper" / "reproduce.html"
    assert pages.exists() and "not started" in pages.read_text()
