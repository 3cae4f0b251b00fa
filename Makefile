# Everything starts here: `make serve` runs the program, `make test` its tests. Both install what they need.
.PHONY: setup serve test test-slow lint bench first-mac clean
.DELETE_ON_ERROR:

BIN := .venv/bin
# A name on the PATH may be a shim that does not run, so each is asked for its version.
NEW := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c '$(NEW)' >/dev/null 2>&1 && echo "$$p" && break; done)
# Python compiles what it imports; all that is installed would take as long again, and 110 MB.
PIP := $(shell command -v uv >/dev/null 2>&1 && echo uv pip install --python $(BIN)/python \
	|| echo $(BIN)/python -m pip install --disable-pip-version-check --no-compile)

setup: .venv/installed

serve: .venv/installed
	$(BIN)/mlxspec serve

test: .venv/developed
	scripts/test -n 3 --dist worksteal

test-slow: .venv/developed
	scripts/test -m "(slow or hypothesis) and not metal" --hypothesis-profile=random -o faulthandler_timeout=1800

lint: .venv/developed
	scripts/check

bench: .venv/developed
	$(BIN)/python -m bench $(ARGS)

first-mac: .venv/developed
	$(BIN)/python scripts/first-mac $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@if "$(PYTHON)" -c '$(NEW)' 2>/dev/null; then \
		echo "Making .venv with $(PYTHON)"; \
		"$(PYTHON)" -m venv .venv || { rm -rf .venv; echo "the venv module of $(PYTHON) does not work; install it, or uv" >&2; exit 1; }; \
		.venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip || echo "pip stays as it is"; \
	elif command -v uv >/dev/null 2>&1; then \
		uv venv --python 3.12 .venv; \
	else \
		echo "mlxspec needs Python 3.11 or newer; install it or uv, or name one: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi

# The stamps are as new as the last install: nothing is done again until pyproject.toml changes.
.venv/installed: pyproject.toml | $(BIN)/python
	@echo "Installing mlxspec and what it needs; the first time takes a minute"
	$(PIP) -e .
	@touch $@

.venv/developed: pyproject.toml | $(BIN)/python
	@echo "Installing the tools for tests and checks"
	$(PIP) -e '.[dev]'
	@touch .venv/installed $@
