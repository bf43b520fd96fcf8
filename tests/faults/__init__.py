"""Mutation tests: ``python -m tests.faults`` plants faults in a copy of the library, and checks that tests fail."""
