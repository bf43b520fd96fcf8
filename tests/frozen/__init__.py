"""The frozen suite: what the command line does, to the last bit, whatever the code behind it looks like.

It starts ``train.py`` and the scripts as a user does. It imports nothing of the library and nothing of other tests, so
that it judges any checkout by the same words, also one from before and after the code was redrawn:

    python -m tests.frozen.suite record new.json                        # this checkout (minutes)
    python -m tests.frozen.suite record old.json --tree ../other        # another one
    python -m tests.frozen.suite record part.json --only '*dlr*'        # some cases
    python -m tests.frozen.suite compare old.json new.json              # exit code 1 and the differences, if any
    python -m tests.frozen.suite errors --tree ../other                 # the messages and exit codes of mistakes

A recording holds for each run its training and evaluation losses (hexadecimal floats) and a hash of every folded
tensor. ``recording.json`` is the committed one. Bits depend on the CPU, the version of torch and the threads, so a
recording names them, and the test (marker ``full``) asks for equal bits only where they are the same. Elsewhere the
losses of fp32 runs must agree to 1e-5, and the hashes are skipped.

``recording.json`` may be written anew only by a commit that is meant to move numbers. It says which and why, and
changes nothing else. A change that renames a key of a case renames it here, and must not move the recording.

The text is drawn from ``random.Random``. The tokenizer is a committed file, as its training may change with versions.

``faults`` plants faults in a copy of the library, and runs the small test that catches each:

    python -m tests.frozen.faults                                       # all, in minutes
    python -m tests.frozen.faults --only fold --only clip               # some
    python -m tests.frozen.faults --check                               # only whether the patches still fit the code
"""
