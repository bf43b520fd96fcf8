"""Gives mkdocs the pages at the paths of a code host, so that a link between two pages works in both places.

mkdocs takes pages from one folder, but these are in several. ``mkdocs.yml`` names this file as a hook.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/*.md", "docs/*.md")
# Not pages, but linked from some.
BESIDE = ("docs/images/*", "docs/evidence/*/*", "docs/*.ipynb", "docs/site.css", "tests/**/*.py")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted(path for pattern in (*PAGES, *BESIDE) for path in ROOT.glob(pattern))
    ours = (File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in paths)
    return Files([*of_theme, *ours])
