"""The configuration of a run: its keys, rules and identity, and the parsing of a command line.

The dataclasses of ``tree`` declare every key once, with all its facts. The keys of a backbone or an optimizer are
declared in its own file. The YAML files under ``configs/`` hold the values of options. The file of the
chosen backbone is the first to import torch, so ``--help`` and mistyped options are answered at once. Only
``command_line`` imports Hydra.
"""

from dlr_pretrain.config.identity import identity
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem
from dlr_pretrain.config.rules import attention_problem, compiler_problem
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, Config
from dlr_pretrain.config.values import flatten, parse, to_dict

__all__ = ["CONFIG_DIR", "GROUPS", "MISSING", "Config", "ConfigError", "Problem", "attention_problem",
           "compiler_problem", "flatten", "identity", "parse", "to_dict"]  # fmt: skip
