# Shortcuts; the README's commands work without make.
.PHONY: test fast matrix kill-soak gpu style

test:       # everything that this machine can run
	python -m pytest -n 3

fast:       # a minute or two: no compilation, no torchrun
	python -m pytest -m "not slow and not exhaustive and not full"

matrix:     # every backbone, DLR, optimizer: 20 steps on 1 and 2 ranks with inductor, resumed, exported, reloaded
	DLR_MATRIX_BACKEND=inductor python -m pytest tests/matrix

kill-soak:  # a hundred kills of two-rank runs, each compared with an undisturbed one (half an hour)
	DLR_KILLS=100 python -m pytest tests/kill -k soak -s

gpu:        # GPU tests, steps, peers, memory, compile times, in pieces; the same command goes on where it was cut off
	benchmarks/gpu.sh results/gpu

style:
	ruff check . && ruff format --check .
