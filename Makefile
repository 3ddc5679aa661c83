# make run   the studio: web, workers, broker, and a sample run on an empty database; Ctrl-C stops all of it
# make worker  a worker alone, on a further machine (docs/hosts.md)
# make test  linters, types, and every test this machine can run
# make demo  the sample run without a browser: reward must rise, the adapter must download and load
# make bench measured beside peers, in one run
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run worker test demo bench setup lint lock
run: setup
	@$(BIN)/python scripts/studio.py

worker: setup
	@$(BIN)/python scripts/studio.py --worker

setup:
	@$(PYTHON) scripts/setup.py

test: lint
	@$(BIN)/python scripts/test.py

lint:
	@$(PYTHON) scripts/setup.py --browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: setup
	@$(BIN)/python scripts/demo.py

bench: setup
	@for file in bench/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The CPU lock needs a place that has torch's CPU wheel, named by UV_FIND_LINKS or UV_EXTRA_INDEX_URL.
LOCK = $(BIN)/uv pip compile pyproject.toml --extra test --no-emit-index-url --no-emit-find-links --no-annotate \
	--no-emit-package setuptools --custom-compile-command "make lock" --upgrade
lock: setup
	$(BIN)/pip install -q uv
	$(LOCK) --extra cpu --python-version 3.11 -c packaging/torch-cpu.txt --no-emit-package torch -o requirements-cpu.txt
	$(LOCK) --extra gpu --python-version 3.12 -c packaging/gpu.txt -o requirements.txt
