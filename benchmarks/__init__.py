"""Benchmarks of the framework, outside its library: ``python -m benchmarks --help``."""
