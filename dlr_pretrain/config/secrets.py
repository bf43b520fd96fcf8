"""Keeps passwords and tokens out of everything that a run writes, sends or prints."""

from __future__ import annotations

import os
import re

HIDDEN = "***"
SHORTEST = 8  # fewest characters of a variable's value that counts as a secret
NAME = re.compile(r"[\w.+]*(?:token|api_?key|access_?key|secret|passw(?:or)?d)", re.IGNORECASE)  # names of secrets
ENTRY = re.compile(rf"(?:^[-~]*|^--\w+=|[,{{]\s*['\"]?)({NAME.pattern})['\"]?\s*[=:]", re.IGNORECASE)
FORMS = (
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),  # user:password in a URL
    re.compile(r"\b(?:hf_|wandb_v\d_|gh[opsu]_|github_pat_)\w{20,}"),
)


def redact(text: str) -> str:
    """``text`` without the values of variables such as HF_TOKEN, passwords in URLs, and tokens of a known form."""
    for name, value in os.environ.items():
        if NAME.fullmatch(name) and len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    for form in FORMS:
        text = form.sub(HIDDEN, text)
    return text


def named_in(text: str) -> str | None:
    """The name of the first secret that a word, or an entry of a list or mapping in it, sets; None if there is none."""
    found = ENTRY.search(text)
    return found[1].lstrip("+") if found else None


def redact_word(word: str) -> str:
    """``redact`` for a word of a command line. It hides the whole value of a key such as hydra.job.env_set.HF_TOKEN."""
    key, sign, _ = word.partition("=")
    return f"{key}={HIDDEN}" if sign and NAME.fullmatch(key) else redact(word)
