"""The configuration of a run: its keys, its rules, its identity, and the reading of a command line.

The dataclasses of ``tree`` state every key once: type, default, bounds and meaning. Those of a backbone or an optimizer
stand in its own file. The YAML files under ``configs/`` hold what an option sets. Nothing here imports torch before the
chosen backbone's file is read, so that ``--help`` and mistyped options are answered at once. This module does not
import Hydra either, because only ``command_line`` needs it.
"""

from dlr_pretrain.config.problems import MISSING, ConfigError, Problem
from dlr_pretrain.config.rules import compiler_problem
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, Config
from dlr_pretrain.config.written import flatten, identity, parse, to_dict

__all__ = ["CONFIG_DIR", "GROUPS", "MISSING", "Config", "ConfigError", "Problem", "compiler_problem",
           "flatten", "identity", "parse", "to_dict"]  # fmt: skip
