# Shortcuts; the README's commands work without make.
.PHONY: test full matrix kill-soak signal-soak gpu style site images

test:       # the README's command: every promise once
	python -m pytest -n 3

test-%:     # one room's tests, as test-data: its unit tests, its folder, its parity
	python -m pytest -n 2 $(or $(wildcard tests/unit/$* tests/$* tests/parity/test_$**.py),$(error no tests of $*))

full:       # what that leaves to continuous integration
	python -m pytest -n 3 -m full

matrix:     # every backbone, DLR, optimizer: 20 steps on 1 and 2 ranks with inductor, resumed, exported, reloaded
	DLR_MATRIX_BACKEND=inductor python -m pytest -m exhaustive tests/golden

kill-soak:  # a hundred kills of two-rank runs, each compared with an undisturbed one (half an hour)
	DLR_KILLS=100 python -m pytest tests/kill -k soak -m full -s

gpu:        # GPU tests, steps, peers, memory, in slices; the same command goes on where it was cut off
	benchmarks/gpu.sh results/gpu

site:       # README and docs as a site in site/, whose links are all valid
	python -m mkdocs build --strict

signal-soak:  # two hundred signals at random moments of a run (half an hour)
	DLR_SIGNALS=200 python -m pytest tests/kill -k any_moment -m full -s

style:
	ruff check . && ruff format --check . && mypy

images:     # the pictures of README and docs, by the commands on their pages (15 minutes); finished runs are kept
	python -m docs.pictures
