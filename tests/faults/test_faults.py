"""The patches of the planted faults fit the current code. ``python -m tests.faults`` plants them."""

from tests.faults.__main__ import ROOT, unfit


def test_the_patches_fit_the_code_and_the_tests():
    assert unfit(ROOT) == []
