"""Fine-tuning by TRL is AdamW on the mean loss of the response's tokens; its commands write folders and text."""

import json
import math
import random
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.deploy.export import open_folder
from dlr_pretrain.deploy.sft import fine_tune, prompt_of, read_rows
from dlr_pretrain.util.errors import UserError
from tests.conftest import main_of
from tests.deploy.models import exported, of_kind

MISSING = find_spec("trl") is None  # its import takes seconds
pytestmark = [pytest.mark.full, pytest.mark.skipif(MISSING, reason='fine-tuning: pip install -e ".[sft]"')]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, corpus):
    root = tmp_path_factory.mktemp("runs")
    return {
        name: exported(root / name / "folded", corpus / "spiece.model", of_kind(name), rows=120)
        for name in ("full", "cola", "lax")
    }


@pytest.fixture
def data(tmp_path):
    """24 instructions in the letters of the corpus; the response repeats the last word."""
    rng, rows = random.Random(0), []
    for i in range(24):
        words = ["".join(rng.choices("aeioulnrst", k=4)) for _ in range(rng.randint(1, 6))]
        given = "tonal lion" * (i % 3 == 0)
        rows.append({"instruction": " ".join(words), "input": given, "output": f"{words[-1]} " * 3})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return str(tmp_path / "rows.json")


def test_the_prompt_is_alpacas(data):
    assert prompt_of("Sort it.", "b\na") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSort it.\n\n### Input:\nb\na\n\n### Response:\n"
    )
    assert prompt_of("Say no.").endswith("request.\n\n### Instruction:\nSay no.\n\n### Response:\n")
    with pytest.raises(UserError, match=r"nowhere\.json: cannot be read: .*--data"):
        read_rows("nowhere.json")


@pytest.mark.parametrize("backbone", ["full", "lax"])
def test_updates_are_those_of_a_plain_loop(folders, data, tmp_path, backbone):
    """Each update takes the mean loss over the targets of its rows, clips its gradient, and uses AdamW with warm-up and
    cosine decay to 0, in fp32."""
    rows, seed, lr, epochs, batch = read_rows(data), 7, 1e-3, 2, 8
    recipe = {"num_train_epochs": epochs, "learning_rate": lr, "batch": batch, "per_device_train_batch_size": 2}
    fine_tune(folders[backbone], tmp_path / "tuned", rows, seed, fp32=True, **recipe)
    model, tokenizer = open_folder(folders[backbone], torch.float32)

    def losses(row: dict) -> torch.Tensor:
        before = len(tokenizer(row["prompt"]).input_ids)
        ids = torch.tensor([tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token).input_ids])
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)
        return -log_p[before - 1 : -1].gather(1, ids[0, before:, None])[:, 0]

    optimizer, steps, wanted = torch.optim.AdamW(model.parameters(), weight_decay=0), 6, []
    for epoch in range(epochs):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for at in range(0, 24, batch):
            loss = torch.cat([losses(rows[i]) for i in order[at : at + batch]]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * len(wanted) / steps)) / 2
            optimizer.step()
            wanted.append(loss.item())
    told = json.loads((tmp_path / "tuned/sft.json").read_text())["training_loss"]
    assert told == pytest.approx(wanted, rel=1e-4) and wanted[-1] < wanted[0]
    tuned = load_file(tmp_path / "tuned/model.safetensors")
    for name, p in model.state_dict().items():
        assert (tuned[name] - p).norm() < 1e-3 * p.norm(), name


def test_the_commands_write_folders_and_text(folders, data, tmp_path, capsys):
    def command(name: str, *words: object) -> tuple[int, str, str]:
        return main_of(name, *words), *capsys.readouterr()

    words = f"--data {data} --seeds 1 2 --output {tmp_path}/sft --epochs 1 --batch 8 --lr 3e-3 --length 300".split()
    assert command("sft", folders["cola"], *words)[0] == 0
    folder = tmp_path / "sft/s1"
    model, _ = open_folder(folder)
    assert model.dtype == torch.float32 and len(json.loads((folder / "sft.json").read_text())["training_loss"]) == 3
    assert "Fine-tuned" in (folder / "README.md").read_text()
    assert not torch.equal(model.lm_head.weight, open_folder(folders["cola"])[0].lm_head.weight)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sft/*/*.safetensors")}
    assert len(times) == 2 and command("sft", folders["cola"], *words)[0] == 0  # everything is there
    assert times == {path: path.stat().st_mtime_ns for path in times}
    code, _, said = command("sft", folders["cola"], *words, "--lr", 1e-3)
    assert code == 3 and f"{folder}: holds a model fine-tuned with other settings (learning_rate: 0.003" in said
    another = tmp_path / "another.json"
    another.write_text(json.dumps(json.loads((tmp_path / "rows.json").read_text())[::-1]))
    code, _, said = command("sft", folders["cola"], *words, "--data", another)
    assert code == 3 and "other settings (texts: " in said
    code, _, said = command("sft", folders["lax"], *words)
    assert code == 3 and "other settings (weights: " in said
    assert times == {path: path.stat().st_mtime_ns for path in times}
    code, _, said = command("sft", folders["cola"], *words, "--seeds", 3, "--batch", 9)
    assert code == 3 and "--batch=9: must be a multiple of 8, " in said

    words = (folder, "--max-new-tokens", 8, "--seed", 3, "--prompt", "tonal lion")
    code, one, _ = command("generate", *words)
    assert code == 0 and one.startswith("tonal lion") and command("generate", *words)[1] == one
    assert command("generate", folder, "--max-new-tokens", 8, "--prompt", "")[0] == 0
    code, two, _ = command("generate", *words, "--instruction", "--temperature", 0, "--prompt", "a tin")
    assert code == 0 and two.startswith("tonal lion\n") and "\na tin\n" in two
