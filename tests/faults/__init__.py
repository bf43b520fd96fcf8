"""Mistakes, planted in a copy of the library to see whether the tests catch them: ``python -m tests.faults``."""
