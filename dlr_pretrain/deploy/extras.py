"""Optional packages: an error names a missing package and the command that installs it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from dlr_pretrain.util.errors import UserError


def need(package: str, extra: str, oldest: tuple[int, ...] = ()) -> str:
    """The installed version of ``package``, from ``pip install -e ".[extra]"``; UserError if absent or too old."""
    fix = f'Install it with: pip install -e ".[{extra}]"'
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UserError(f"this command needs {package}, which is not installed. {fix}") from None
    if tuple(map(int, re.findall(r"\d+", found)[: len(oldest)])) < oldest:
        wanted = ".".join(map(str, oldest))
        raise UserError(f"this command needs {package} {wanted} or newer, and finds {found}. {fix}")
    return found
