"""Measurements beside each other: steps of ours and of peers, folding, memory, the start of a run."""
