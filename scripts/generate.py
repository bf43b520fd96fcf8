"""Continue prompts with a deployed folder: ``python scripts/generate.py runs/<run>/folded --prompt "The house"``."""

import argparse
import math
import sys
from pathlib import Path

from dlr_pretrain.config.arguments import Parser, at_least_1
from dlr_pretrain.config.run_folder import exported_folder
from dlr_pretrain.util.errors import command


def main() -> int:
    example = "example: generate.py runs/my-run --prompt 'The house'"
    parser = Parser(description="Continue prompts. The text goes to standard output.", epilog=example)
    add = parser.add_argument
    add("folder", type=Path, help="a run, or what train.py, fold.py or sft.py wrote")
    add("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    add("--instruction", action="store_true", help="prompts are instructions for a folder that sft.py wrote")
    add("--max-new-tokens", type=at_least_1, default=100, metavar="N", help="(default: %(default)s)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: %(default)s)")
    add("--top-p", type=float, default=0.95, help="keep the likeliest tokens up to this share (default: %(default)s)")
    add("--seed", type=int, default=0, help="for the draws (default: %(default)s)")
    given = parser.parse_args()
    if not (0 <= given.temperature < math.inf and 0 < given.top_p <= 1 and 0 <= given.seed < 2**32):
        parser.error("--temperature and --seed must be at least 0, and --top-p above 0 and at most 1")
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    folder = exported_folder(given.folder)
    import torch
    from transformers import set_seed

    from dlr_pretrain.deploy.export import continuation, open_folder
    from dlr_pretrain.deploy.sft import prompt_of

    model, tokenizer = open_folder(folder)
    how = {"do_sample": given.temperature > 0, "max_new_tokens": given.max_new_tokens}
    if how["do_sample"]:
        how |= {"temperature": given.temperature, "top_p": given.top_p, "top_k": None}
    set_seed(given.seed)
    for prompt in given.prompt:
        ids = tokenizer(prompt_of(prompt) if given.instruction else prompt).input_ids or [tokenizer.eos_token_id]
        written = model.generate(torch.tensor([ids], device=model.device), **how)[0].tolist()
        print(prompt, continuation(tokenizer, ids, written), sep="\n" if given.instruction else "", flush=True)


if __name__ == "__main__":
    sys.exit(main())
