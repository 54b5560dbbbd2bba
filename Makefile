# Each target makes the environment it needs, pinned by constraints*.txt; it needs Python 3.11 or
# newer, make and git. To choose the Python: make test PYTHON=/usr/bin/python3.12
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
NOX := .nox/.venv/bin/nox

.PHONY: demo demo-verl test lint bench clean

demo: .venv/installed
	.venv/bin/composer-plugins demo

# In the environment of verl's tests, which nox installs here and runs nothing in.
demo-verl: .nox/.venv/installed
	@$(NOX) -s verl --install-only 2> .nox/demo-verl.log || { cat .nox/demo-verl.log >&2; exit 1; }
	@.nox/verl/bin/python -m parity_tests.support.verl_cpu.demo

# Nox writes its own log to stderr: kept aside unless something fails, so that the last lines
# printed are pytest's summary. One call runs all of them, the next even if one fails.
test: .nox/.venv/installed
	@$(NOX) -s kernels trl verl 2> .nox/test.log || { cat .nox/test.log >&2; exit 1; }

lint: .nox/.venv/installed
	@$(NOX) -s lint types

bench: .nox/.venv/installed
	@$(NOX) -s bench

clean:
	rm -rf .nox .venv build demo_out dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The version is checked first because pip would say it late and in other words.
define venv
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "'$(PYTHON)' is not Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
@"$(PYTHON)" -m venv $(@D)
endef

.venv/installed: constraints.txt pyproject.toml
	$(venv)
	@echo "demo: installing PyTorch and TRL into .venv, minutes the first time"
	@.venv/bin/pip install -qq -c constraints.txt -e '.[demo]'
	@touch $@

.nox/.venv/installed: constraints.txt
	$(venv)
	@$(@D)/bin/pip install -qq -c constraints.txt nox
	@touch $@
