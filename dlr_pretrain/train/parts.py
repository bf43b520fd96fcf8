"""Names the parts of a step in traces, with ``torch.profiler`` ranges; without a profiler they cost next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps

from torch.profiler import record_function


def part(name: str) -> Callable[[Callable], Callable]:
    """A decorator: traces show the calls of the function as the part ``name``."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def called(*arguments, **keywords):
            with record_function(name):
                return function(*arguments, **keywords)

        return called

    return decorate


class Entering(AbstractContextManager):
    """Wraps ``context``: entering and leaving it count as the part ``name``, the code inside does not."""

    def __init__(self, name: str, context: AbstractContextManager):
        self.name, self.context = name, context

    def __enter__(self):
        with record_function(self.name):
            return self.context.__enter__()

    def __exit__(self, *error):
        with record_function(self.name):
            return self.context.__exit__(*error)
