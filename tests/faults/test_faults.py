"""The planted faults keep up with the code. Planting them is left to ``python -m tests.faults``."""

from tests.faults.__main__ import ROOT, unfit


def test_the_patches_fit_the_code_and_the_tests():
    assert unfit(ROOT) == []
