"""Measurements of the framework, which are no part of its library: ``python -m benchmarks --help``."""
