"""The commands. Installing the package makes each a program: see ``pyproject.toml``."""
