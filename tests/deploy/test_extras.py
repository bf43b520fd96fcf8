"""A command whose optional packages are absent says what installs them."""

import importlib.metadata
import subprocess
import sys

import pytest

from dlr_pretrain.deploy.extras import need
from dlr_pretrain.util.errors import UserError
from tests.conftest import ROOT


def test_a_package_that_is_absent_or_old_is_named_with_its_fix(monkeypatch):
    versions = {"fine": "1.10.2rc1", "old": "1.9"}
    monkeypatch.setattr("dlr_pretrain.deploy.extras.version", lambda name: _version(versions, name))
    assert need("fine", "eval", (1, 10)) == "1.10.2rc1"
    with pytest.raises(UserError, match=r'needs absent, which is not installed. .* pip install -e "\.\[eval\]"'):
        need("absent", "eval")
    with pytest.raises(UserError, match=r'needs old 1\.10 or newer, and finds 1\.9\. .* pip install -e "\.\[sft\]"'):
        need("old", "sft", (1, 10))


def _version(versions: dict[str, str], name: str) -> str:
    if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
    return versions[name]


def test_evaluate_without_the_harness_says_how_to_install_it():
    hide = (
        "import importlib.metadata as m, runpy, sys; found = m.version\n"
        "def version(name):\n"
        "    if name == 'lm-eval': raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        "sys.argv = ['evaluate.py', 'folded']; runpy.run_path('scripts/evaluate.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", hide], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert 'needs lm-eval, which is not installed. Install it with: pip install -e ".[eval]"' in done.stderr
    assert "Traceback" not in done.stderr
