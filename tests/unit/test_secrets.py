"""No password or token is written, sent or printed."""

from __future__ import annotations

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.config.secrets import redact, redact_word
from dlr_pretrain.launch.runs import expand
from dlr_pretrain.launch.submit import refuse_secrets
from dlr_pretrain.util.errors import UserError

TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(("text", "shown"), [
    ("https://user:pw@host:8080/x", "https://***@host:8080/x"),
    ("http://tok3n@host http://b:c@d", "http://***@host http://***@d"),
    (f"say {TOKEN}!", "say ***!"),
    ("wandb_v1_" + "k" * 40, "***"),
    ("https://host/a@b", "https://host/a@b"),
    ("/data/hf_cache/token=3/en", "/data/hf_cache/token=3/en"),
    ("0123456789abcdef" * 2, "0123456789abcdef" * 2),  # a revision
])  # fmt: skip
def test_passwords_of_urls_and_tokens_are_hidden_and_nothing_else(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "db_password"])
def test_values_of_secret_variables_are_hidden(monkeypatch, name):
    monkeypatch.setenv(name, "correct horse")
    monkeypatch.setenv("MY_HORSE", "battery staple")
    assert redact("a correct horse, a battery staple") == "a ***, a battery staple"
    monkeypatch.setenv(name, "1")  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1
    assert redact("step 1") == "step 1"


@pytest.mark.parametrize(("word", "shown"), [
    ("+hydra.job.env_set.HF_TOKEN=short", "+hydra.job.env_set.HF_TOKEN=***"),
    ("tokenizer.path=/x", "tokenizer.path=/x"),
    ("data.root=https://a:b@c", "data.root=https://***@c"),
    ("train.py", "train.py"),
])  # fmt: skip
def test_words_of_a_command_hide_what_their_key_names_a_secret(word, shown):
    assert redact_word(word) == shown


@pytest.mark.parametrize(("word", "named"), [
    ("+wandb.api_key=planted", "WANDB_API_KEY"),
    ("data.token=planted,other", "HF_TOKEN"),
    ("+hydra.job.env_set.MY_SECRET=planted", "MY_SECRET"),
    ("hydra.job.env_set={'WANDB_API_KEY': planted}", "WANDB_API_KEY"),
    ("--wandb.api_key=planted", "WANDB_API_KEY"),
    ("logger.api_key= planted", "WANDB_API_KEY"),
    (f"hydra.run.dir=planted/{TOKEN}", "HF_TOKEN"),
])  # fmt: skip
@pytest.mark.parametrize("check", [lambda words: load(words), lambda words: expand(words)], ids=["train", "submit"])
def test_a_word_with_a_secret_is_refused_and_the_variable_named(word, named, check):
    with pytest.raises(ConfigError) as refused:
        check(["scale=tiny", "data=sample", "logger=jsonl", *word.split(" ", 1 if "= " in word else 0)])
    assert "a password or a token" in str(refused.value) and named in str(refused.value)
    assert "planted" not in str(refused.value).replace("planted/***", "")


@pytest.mark.parametrize("word", ["--export=ALL,HF_TOKEN=planted", "--export=HF_TOKEN=planted", "HF_TOKEN=planted"])
def test_words_for_sbatch_with_a_secret_are_refused(word):
    with pytest.raises(UserError, match=r"HF_TOKEN is a password or a token.*Export it where you submit") as refused:
        refuse_secrets(["--export", word] if word[0] == "H" else [word])
    assert "planted" not in str(refused.value)


@pytest.mark.parametrize("word", [
    "data.root=https://user:pa55@host/c4",
    f"logger.entity={TOKEN}",
    "tokenizer.path=/keys/planted-value/spiece.model",
])  # fmt: skip
def test_a_configuration_with_a_secret_is_refused_without_showing_it(monkeypatch, word):
    monkeypatch.setenv("HF_TOKEN", "planted-value")
    with pytest.raises(UserError, match="holds a password or a token") as refused:
        load(["scale=tiny", "data=c4_local", "logger=wandb", word])
    assert word.partition("=")[0] in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("pa55", TOKEN, "planted-value"))
