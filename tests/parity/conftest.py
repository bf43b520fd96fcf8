"""Each test compiles anew: Dynamo counts the graphs of a function over all tests of a process."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
