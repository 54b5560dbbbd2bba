# Each target makes the environment that it needs, pinned by constraints*.txt. Needed beforehand: Python 3.11
# or newer, make and git. To choose the Python: make test PYTHON=/usr/bin/python3.12
# Programs are started by `python -m`, because the first line of a script cannot name a long path.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
NOX := .nox/.venv/bin/python -m nox
INSTALLS := install-verl install-trl install-kernels
GROUPS := test-verl test-trl test-kernels test-trl_versions
RECIPES := test-monarch test-diloco test-openenv test-trace_replay
TRLS := 1.9.0

.PHONY: demo demo-verl test test-all $(INSTALLS) install-recipes install-smollm $(GROUPS) $(RECIPES) recipe-smollm recipe-smollm-verl test-smollm test-tinker test-tinker_server install-tinker install-tinker_server install-skyrl test-skyrl recipe-tinker test-docs test-first lint bench pages checkouts site docs release-check newest clean

demo: .venv/installed
	.venv/bin/python -m composer_plugins demo

# Runs in the environment of verl's tests, which nox installs first if necessary.
demo-verl: install-verl
	@.nox/verl/bin/python -m composer_plugins.recipes.verl.on_a_cpu.demo

# One of recipes/ that has a command of its own: make recipe-diloco, recipe-monarch, recipe-openenv, recipe-trace_replay,
# recipe-smollm and recipe-tinker in an environment of its own each, and recipe-smollm-verl in that of verl's tests.
recipe-smollm: install-smollm
	@.nox/smollm/bin/python -m composer_plugins.recipes.smollm

recipe-smollm-verl: install-verl
	@.nox/verl/bin/python -m composer_plugins.recipes.smollm.in_verl

recipe-tinker: install-tinker_server
	@.nox/tinker_server/bin/python -m composer_plugins.recipes.tinker

recipe-%: install-recipes
	@.nox/recipes/bin/python -m composer_plugins.recipes.$* $(if $(filter trace_replay,$*),demo)

# `test` leaves out the tests marked slow, the recipes, the site, and of the older versions of TRL all but
# one. Both use two cores: first the environments are made, because some groups share one, and then the groups
# run, the longest first. Each prints its output when it ends. Nox's own log goes to a file and is printed if
# something fails, so that the last lines printed are pytest's summary.
PARALLEL = $(MAKE) --no-print-directory -k -j2 $(filter -O,$(.FEATURES:output-sync=-O))
test-all: ALL := -- --all
test-all: INSTALLS += install-recipes install-smollm install-skyrl install-tinker install-tinker_server
test-all: GROUPS += $(RECIPES) test-smollm test-skyrl test-tinker test-tinker_server test-docs
test-all: TRLS :=
test test-all: .nox/.venv/installed
	@$(PARALLEL) $(INSTALLS)
	@echo "running $(GROUPS:test-%=%); each prints its output when it ends"
	@$(PARALLEL) ALL="$(ALL)" TRLS="$(TRLS)" $(GROUPS)

test-kernels test-trl test-verl test-skyrl test-smollm test-tinker test-tinker_server: test-%:
	@$(NOX) -s $* $(ALL) 2> .nox/$*.log || { cat .nox/$*.log >&2; exit 1; }

# The first tier: about a minute, in the environment of the session kernels, which install-kernels makes.
test-first:
	@.nox/kernels/bin/python -m pytest

test-trl_versions:
	@$(NOX) -s trl_versions -- $(TRLS) 2> .nox/trl_versions.log || { cat .nox/trl_versions.log >&2; exit 1; }

$(RECIPES): test-%:
	@$(NOX) -s recipes -- $* --all 2> .nox/$@.log || { cat .nox/$@.log >&2; exit 1; }

test-docs:
	@$(NOX) -s docs $(ALL) 2> .nox/$@.log || { cat .nox/$@.log >&2; exit 1; }

$(INSTALLS) install-recipes install-smollm install-skyrl install-tinker install-tinker_server: install-%: .nox/.venv/installed
	@$(NOX) -s $* --install-only 2> .nox/$@.log || { cat .nox/$@.log >&2; exit 1; }

lint: .nox/.venv/installed
	@$(NOX) -s lint types

bench: .nox/.venv/installed
	@$(NOX) -s bench

# The sessions that need a checkout of a framework, which CI does not run, and their record, parity_tests/checkouts.json:
# make checkouts PRIME_RL=DIR NEMO_RL=DIR SLIME=DIR SKYRL=DIR, or some of them; DIR:DIR are two checkouts.
checkouts: .nox/.venv/installed
	@.nox/.venv/bin/python -m parity_tests.checkouts $(foreach name,PRIME_RL NEMO_RL SLIME SKYRL,$(if $($(name)),$(name)="$($(name))"))

# What programs write into the pages of docs/: each environment writes the tables that it can make.
pages: $(INSTALLS)
	@for name in kernels trl verl; do \
	    echo "$$name:"; \
	    .nox/$$name/bin/python -m docs.generator 2> .nox/pages.log \
	        || { cat .nox/pages.log >&2; exit 1; }; \
	done
	@.nox/kernels/bin/python -m docs.generator --rest

# The site, in site/: open site/index.html. `docs` also runs its tests, which need Chromium (apt-get install chromium).
site docs: .nox/.venv/installed
	@$(NOX) -s $@

# The sdist and the wheel, in dist/: built, checked, and used in a folder without the clone.
release-check: .nox/.venv/installed
	@$(NOX) -s release

# Our losses with the newest release of a framework, whatever the bounds are: make newest, or make newest-trl.
newest: newest-torch newest-trl newest-verl newest-skyrl newest-tinker
	@.nox/.venv/bin/python -m benchmarks.newest --table

newest-%: .nox/.venv/installed
	@$(NOX) -s "newest($*)"

clean:
	rm -rf .nox .venv build demo_out dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
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
	@.venv/bin/python -m pip install -qq -c constraints.txt -e '.[demo]'
	@touch $@

.nox/.venv/installed: constraints.txt
	$(venv)
	@$(@D)/bin/python -m pip install -qq -c constraints.txt nox
	@touch $@
