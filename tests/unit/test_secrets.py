"""No password or token is written, sent or printed."""

from __future__ import annotations

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.config.problems import redact

TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(("text", "shown"), [
    ("https://user:pw@host:8080/x", "https://***@host:8080/x"),
    ("http://tok3n@host http://b:c@d", "http://***@host http://***@d"),
    (f"say {TOKEN}!", "say ***!"),
    ("wandb_v1_" + "k" * 40, "***"),
    ("a correct horse, a battery staple, step 1", "a ***, a battery staple, step 1"),
    ("https://host/a@b", "https://host/a@b"),
    ("https://b.s3.amazonaws.com/c4?X-Amz-Signature=0af9&x=1", "https://b.s3.amazonaws.com/c4?***&x=1"),
    ("https://b.blob.core.windows.net/c4?sv=2024&sig=a%2Bb", "https://b.blob.core.windows.net/c4?sv=2024&***"),
    ("https://host/c4?access_token=abc", "https://host/c4?***"),
    ("https://host/c4?token=abc#1", "https://host/c4?***#1"),
    ("https://host/c4?api_key=abc&page=2", "https://host/c4?***&page=2"),
    ("AKIA" + "ABCD2345" * 2, "***"),
    ("sk-proj-" + "k3" * 12, "***"),
    ("glpat-" + "k3" * 12, "***"),
    ("xoxb-" + "1234-" * 6 + "k3", "***"),
    ("AIza" + "k" * 35, "***"),
    ("DJANGO is a long story", "DJANGO is ***"),
    ("/home/me/work/runs", "/home/me/work/runs"),  # the shell's PWD
    ("task-of-a-very-long-name-with-dashes", "task-of-a-very-long-name-with-dashes"),
    ("/data/hf_cache/token=3/en", "/data/hf_cache/token=3/en"),
    ("0123456789abcdef" * 2, "0123456789abcdef" * 2),  # a revision
])  # fmt: skip
def test_secrets_are_hidden_and_nothing_else(monkeypatch, text, shown):
    variables = {
        "WANDB_API_KEY": "correct horse",
        "MY_HORSE": "battery staple",
        "SECRET_KEY": "a long story",
        "PWD": "/home/me/work",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert redact(text) == shown


@pytest.mark.parametrize("word", [
    "data.root=https://user:pa55@host/c4",
    f"logger.entity={TOKEN}",
    f"data.token={TOKEN}",
    "tokenizer.path=/keys/planted-value/spiece.model",
])  # fmt: skip
def test_a_configuration_with_a_secret_is_refused_without_showing_it(monkeypatch, word):
    monkeypatch.setenv("HF_TOKEN", "planted-value")
    with pytest.raises(ConfigError) as refused:
        load(["scale=tiny", "data=c4_local", "data.root=.", "logger=wandb", word])
    assert word.partition("=")[0] in str(refused.value) and "***" in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("pa55", TOKEN, "planted-value"))
