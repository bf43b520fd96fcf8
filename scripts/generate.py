"""Continue prompts with a deployed folder: ``python scripts/generate.py runs/<run>/folded --prompt "The house"``."""

import argparse
import sys
from pathlib import Path

from dlr_pretrain.config import MISSING, ConfigError, Problem
from dlr_pretrain.deploy.job import command, device_of
from dlr_pretrain.util.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Text goes to standard output, and streams where there is one prompt; the speed to standard error.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", type=Path, help="what train.py, fold.py or sft.py wrote")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times: one batch")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line")
    add("--instruction", action="store_true", help="prompts are instructions to a folder of sft.py")
    add("--tokens", type=int, default=100, help="new ones at most (default: 100)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--top-p", type=float, default=0.95, help="draw from the likeliest that hold this share (default: 0.95)")
    add("--seed", type=int, default=0, help="of the draws (default: 0)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: that of the file")
    add("--device", help="default: a GPU where there is one")
    given = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # characters that its encoding lacks become question marks
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    prompts = check(given)
    import torch

    from dlr_pretrain.deploy.alpaca import prompt_of
    from dlr_pretrain.deploy.folder import open_folder
    from dlr_pretrain.deploy.generate import Sampling, Stream, continuation, generate

    device = device_of(given.device)
    model, tokenizer = open_folder(given.folder, "auto" if given.dtype == "auto" else getattr(torch, given.dtype))
    model.to(device)
    texts = [prompt_of(prompt) for prompt in prompts] if given.instruction else prompts
    longest = max(map(len, tokenizer.encode(texts)))
    if longest + given.tokens > (positions := model.config.max_position_embeddings):
        note = f"{longest} + {given.tokens} tokens are more than the {positions} positions of this model"
        print(f"note: {note}: expect worse text at the end", file=sys.stderr)
    sampling = Sampling(given.tokens, given.temperature, given.top_p, given.seed)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    shown = ["" if given.instruction else prompt for prompt in prompts]
    if len(texts) == 1:
        write(shown[0])
        found = generate(model, tokenizer, texts, sampling, Stream(tokenizer, texts[0], write))
        write("\n")
    else:
        found = generate(model, tokenizer, texts, sampling)
        for head, prompt, read, new in zip(shown, prompts, found.prompts, found.new, strict=True):
            said = continuation(tokenizer, read, new)
            print(f"{head}{said}\n" if head else f"> {prompt}\n{said.strip()}\n")
    print(found.describe(), file=sys.stderr)


def check(given: argparse.Namespace) -> list[str]:
    """The prompts; raises ConfigError, which names every argument that is out of its bounds."""
    prompts = given.prompt
    if given.prompts:
        try:
            lines = given.prompts.read_text(encoding="utf-8").split("\n")  # splitlines also cuts at Unicode separators
        except UnicodeDecodeError as error:
            raise UserError(f"{given.prompts}: is not UTF-8: {error}. Save it as UTF-8 text") from error
        prompts = prompts + [line for line in lines if line.strip()]
    problems = [] if prompts else [Problem("--prompt", MISSING, "is missing", "Say what shall be continued")]
    problems += [
        Problem(f"--{name}", getattr(given, name.replace("-", "_")), rule)
        for name, holds, rule in (
            ("tokens", given.tokens >= 1, "must be at least 1"),
            ("temperature", given.temperature >= 0, "must be at least 0"),
            ("top-p", 0 < given.top_p <= 1, "must be above 0 and at most 1"),
            ("seed", 0 <= given.seed < 2**64, "must be at least 0 and below 2^64"),
        )
        if not holds
    ]
    if problems:
        raise ConfigError(problems)
    return prompts


if __name__ == "__main__":
    sys.exit(main())
