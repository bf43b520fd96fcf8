"""Benchmarks side by side: our steps and those of peers, folding, memory, compile times."""
