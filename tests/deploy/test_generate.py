"""What is generated in a batch, with the cache, is what the trained model makes of each prompt alone, without one."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.data.tokenizer import EOS, Tokenizer
from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.deploy.generate import Sampling, Stream, continuation, generate
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.util.errors import UserError
from tests.conftest import script
from tests.deploy.models import configured, exported

pytest.importorskip("transformers")

PROMPTS = ["ton sets tone on a nest in a lone tin and sails east", "lions", "no sun is in it."]
PIECES, ROWS = 120, 124  # four rows of the embedding have no text
BACKBONES = {
    "full": ("backbone=full",),
    "lowrank": ("backbone=lowrank", "scale.rank=8"),
    "cola": ("backbone=cola", "scale.rank=8"),
    "lost": ("backbone=lost", "scale.rank=8"),
    "lax": ("backbone=lax", "scale.rank=8"),
    "cola_lax": ("backbone=cola_lax", "scale.rank=8", "backbone.gate=dense"),
}


@pytest.fixture(scope="module")
def spiece(corpus):
    return corpus / "spiece.model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, spiece):
    return exported(tmp_path_factory.mktemp("lax") / "folded", spiece, *BACKBONES["lax"], rows=ROWS)


def likeliest(model: Llama, ids: list[int], count: int) -> list[int]:
    """The definition: read everything anew for each token, take the likeliest id that has a text."""
    new = []
    while len(new) < count and new[-1:] != [EOS]:
        with torch.no_grad():
            new.append(model.logits(torch.tensor([ids + new]))[0, -1, :PIECES].argmax().item())
    return new


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_batch_with_the_cache_is_each_prompt_alone_in_the_training_model(tmp_path, spiece, backbone):
    folder = exported(tmp_path / "folded", spiece, *BACKBONES[backbone], rows=ROWS, seed=2)
    trained = Llama(configured(*BACKBONES[backbone]), ROWS).double()
    trained.load_state_dict(load_file(folder / "model.safetensors"))
    model, tokenizer = open_folder(folder, torch.float64)
    wanted = [likeliest(trained, ids, 20) for ids in tokenizer.encode(PROMPTS)]
    assert len({tuple(new) for new in wanted}) == len(PROMPTS) and max(len(set(new)) for new in wanted) > 3
    greedy = Sampling(tokens=20, temperature=0)
    assert generate(model, tokenizer, PROMPTS, greedy).new == wanted
    assert generate(model, tokenizer, PROMPTS, greedy, use_cache=False).new == wanted


def test_a_text_streams_as_it_is_read_in_the_end(folder):
    model, tokenizer = open_folder(folder)
    pieces: list[str] = []
    stream = Stream(tokenizer, PROMPTS[1], pieces.append)
    found = generate(model, tokenizer, PROMPTS[1:2], Sampling(tokens=30, seed=3), stream)
    assert len(pieces) == len(found.new[0]) == 30
    assert "".join(pieces) == continuation(tokenizer, found.prompts[0], found.new[0])
    assert PROMPTS[1] + "".join(pieces) == tokenizer.decode(found.prompts[0] + found.new[0])


def test_a_row_ends_with_its_own_end_of_sequence(folder):
    model, tokenizer = open_folder(folder)
    found = generate(model, tokenizer, PROMPTS * 8, Sampling(tokens=40, temperature=100.0, top_p=1.0))
    ends = [new.index(EOS) + 1 if EOS in new else 40 for new in found.new]
    assert [len(new) for new in found.new] == ends
    assert len(set(ends)) > 2
    assert max(map(max, found.new)) == PIECES - 1  # drawn evenly, and never an id without a text
    assert f"{sum(ends):,} new ones" in found.describe()


def test_draws_are_those_of_the_seed(folder):
    model, tokenizer = open_folder(folder)

    def drawn(**how) -> list[list[int]]:
        return generate(model, tokenizer, PROMPTS, Sampling(tokens=15, **how)).new

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert drawn(temperature=1e-3) == drawn(temperature=0) == drawn(top_p=1e-6)


def test_a_prompt_without_a_token_is_refused(folder):
    model, tokenizer = open_folder(folder)
    with pytest.raises(UserError, match="prompt ' ' has no tokens"):
        generate(model, tokenizer, [PROMPTS[1], " "], Sampling())


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs scripts/generate.py here: exit code, standard output, standard error."""
    module = script("generate")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
        code = module.main()
        return code, *capsys.readouterr()

    return run


def test_the_command_prints_text_and_speed(command, folder, tmp_path):
    words = (folder, "--tokens", 12, "--temperature", 0)
    code, alone, speed = command(*words, "--prompt", PROMPTS[1])
    assert code == 0 and alone.startswith(PROMPTS[1]) and "12 new ones" in speed and "tokens/s" in speed
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS))
    code, batch, speed = command(*words, "--prompts", tmp_path / "prompts.txt")
    assert code == 0 and alone.strip() in batch.split("\n\n") and "36 new ones" in speed
    code, answer, _ = command(*words, "--instruction", "--prompt", PROMPTS[1])
    model, tokenizer = open_folder(folder)
    asked = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    asked += f"\n\n### Instruction:\n{PROMPTS[1]}\n\n### Response:\n"
    found = generate(model, tokenizer, [asked], Sampling(12, temperature=0))
    assert answer.strip() == continuation(tokenizer, found.prompts[0], found.new[0]).strip()


def test_the_command_names_what_is_wrong(command, folder, tmp_path):
    code, _, said = command(folder, "--tokens", 0, "--temperature", -1, "--top-p", 0, "--seed", 2**64)
    assert code == 2
    assert all(f"--{name}" in said for name in ("prompt", "tokens", "temperature", "top-p", "seed"))
    code, _, said = command(tmp_path, "--prompt", "a")
    assert code == 3 and said.startswith(f"error: {tmp_path}: has no config.json")
    code, _, said = command(folder, "--prompt", PROMPTS[1], "--tokens", 1022)
    assert code == 0 and f"{len(Tokenizer(folder / 'spiece.model').encode(['lions'])[0])} + 1022 tokens" in said


def test_the_command_names_a_file_of_another_encoding_and_a_device_that_is_not_there(command, folder, tmp_path):
    (tmp_path / "latin1.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "separators.txt").write_bytes("one\u2028prompt\x85of\x0cone line\r\n\r\nanother".encode())
    code, text, _ = command(folder, "--prompts", tmp_path / "separators.txt", "--tokens", 2)
    assert code == 0 and text.startswith("one\u2028prompt\x85of\x0cone line") and "\n\nanother" in text
    code, _, said = command(folder, "--prompts", tmp_path / "latin1.txt")
    assert code == 3 and f"{tmp_path}/latin1.txt: is not UTF-8" in said
    code, text, _ = command(folder, "--prompt", "lions\udcff", "--tokens", 2)  # as Python reads such a word of a shell
    assert code == 0 and text.startswith("lions?")
    code, _, said = command(folder, "--prompt", "a", "--device", "gpu")
    assert code == 3 and said.startswith("error: --device gpu: ")


def test_the_tokenizer_of_the_folder_is_read_by_sentencepiece(folder, spiece):
    assert open_folder(folder)[1].fingerprint == Tokenizer(spiece).fingerprint
