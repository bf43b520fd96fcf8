"""Find in a minute what would fail after hours: ``python scripts/doctor.py``, or under torchrun, like train.py."""

import sys

from dlr_pretrain.cli import load, world_size
from dlr_pretrain.config.arguments import Parser
from dlr_pretrain.util import process
from dlr_pretrain.util.errors import EXIT_FAILED, command

EXAMPLE = "example: torchrun --nproc-per-node 8 scripts/doctor.py scale=1b backbone=cola dlr=on"


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, EXIT_FAILED if a check failed, or that of a UserError."""
    process.die_with_agent()
    about = "Checks a machine, or under torchrun all ranks, for the run with these overrides. The run is not changed."
    parser = Parser("doctor.py", usage="%(prog)s [key=value ...]", description=about, epilog=EXAMPLE)
    _, words = parser.parse_known_args(argv)
    return command(lambda: 0 if sound(words) else EXIT_FAILED)


def sound(words: list[str]) -> bool:
    """Whether no check has failed. Raises ConfigError if the configuration is invalid on every machine."""
    cfg = load(words, world_size(), machine=False)
    from dlr_pretrain import doctor  # torch, after the words are checked

    return doctor.sound(cfg, words)


if __name__ == "__main__":
    sys.exit(main())
