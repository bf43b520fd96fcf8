"""The commands. An installation makes a program of each, see ``pyproject.toml``."""
