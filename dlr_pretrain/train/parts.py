"""The parts of a step by name, as a trace shows them (``torch.profiler`` ranges, which cost nothing without one)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps

from torch.profiler import record_function


def part(name: str) -> Callable[[Callable], Callable]:
    """Calls of a function are the part ``name``."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def called(*arguments, **keywords):
            with record_function(name):
                return function(*arguments, **keywords)

        return called

    return decorate


class Entering(AbstractContextManager):
    """Enters and leaves ``context`` as the part ``name``; what runs inside belongs to other parts."""

    def __init__(self, name: str, context: AbstractContextManager):
        self.name, self.context = name, context

    def __enter__(self):
        with record_function(self.name):
            return self.context.__enter__()

    def __exit__(self, *error):
        with record_function(self.name):
            return self.context.__exit__(*error)
