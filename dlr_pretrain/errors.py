"""Errors that a user can mend. They end a run with one clear message and no traceback."""

EXIT_CONFIG = 2  # a configuration problem: nothing was started
EXIT_FAILED = 3  # data, files, the hub or another run stood in the way
EXIT_STOPPED = 75  # stopped early and saved: the same command continues the run


class UserError(Exception):
    """What went wrong, with the file or key, and the mend; ``exit_code`` ends the process."""

    exit_code = EXIT_FAILED


class Stopped(UserError):
    """The run was asked to stop before its last step, and has saved its state."""

    exit_code = EXIT_STOPPED
