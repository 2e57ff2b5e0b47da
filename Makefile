# make train   installs into .venv and trains a small GPT through a four-stage pipeline
# make test    ruff, mypy strict, pytest
# make test-jobs    whole jobs in processes of their own: launchers, ssh, kills and resumes, examples; meshes of processes, the
#              rules of nccl; CI runs what it has time for
# make site    the documentation with API, playground and a gallery of reports, in English and in Chinese, in build/site
# make soak    an hour of training with random kills, resumes and re-splits against the oracle; SOAK_MINUTES=5 for less
# make test-system    every failure at every moment of a run; over several hosts: ssh between network namespaces, a
#              SLURM; the site and its playground in Chromium; installs these when root on Debian
# make test-matrix    every schedule with tensor parallelism, replicas, ZeRO-1, recomputation, precisions: all cells
# make orion   builds the library that lets microbatches share a GPU by priority; needs a C++ compiler, no CUDA
# make gpu     on a machine with a GPU or another accelerator, with the Python that is there: tests and measures, under 14
#              minutes; installs nothing

PYTHON ?= python3
SOAK_MINUTES ?= 60
SYSTEM_TESTS ?= system
CMAKE ?= cmake
BIN := .venv/bin
ORION := kernel_intercept
INSTALLED := .venv/installed

# An import compiles a file once, not in every process of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test mypy pytest test-jobs test-system test-matrix site soak gpu orion install

train: $(INSTALLED)
	$(BIN)/vpipe train configs/gpt_mini_4stage.yaml

test: $(INSTALLED)
	@echo "== ruff"
	@$(BIN)/ruff check
	@$(MAKE) --no-print-directory --jobs 2 mypy pytest

# Beside each other: mypy has one process.
mypy:
	@echo "== mypy --strict"
	@$(BIN)/mypy

pytest:
	@echo "== pytest"
	@$(BIN)/pytest --numprocesses 3 --dist loadgroup

test-jobs: $(INSTALLED)
	@echo "== pytest -m jobs"
	@$(BIN)/pytest -m 'jobs and not system and not matrix' --numprocesses 3 --dist loadgroup

test-system: $(INSTALLED) $(BIN)/mkdocs
	@echo "== installing ssh, SLURM and Chromium"
	@tests/system/install
	@echo "== pytest -m '$(SYSTEM_TESTS)'"
	@$(BIN)/pytest -m '$(SYSTEM_TESTS)' -rs --numprocesses 2 --dist loadgroup

test-matrix: $(INSTALLED)
	@$(BIN)/pytest -m matrix --numprocesses 2 tests/matrix

site: $(INSTALLED) $(BIN)/mkdocs
	@echo "== building build/site (trains the gallery's six runs)"
	@rm -rf build/site
	@$(BIN)/python site/build.py build/site

soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak/run.py --minutes $(SOAK_MINUTES)

gpu:
	@$(PYTHON) benchmarks/gpu/run.py $(GPU)

orion:
	@mkdir -p $(ORION)/build
	@if command -v $(CMAKE) > /dev/null; then $(CMAKE) -S $(ORION) -B $(ORION)/build && $(CMAKE) --build $(ORION)/build; \
	else $(CXX) -std=c++17 -O2 -fPIC -shared -fvisibility=hidden -pthread -static-libstdc++ -static-libgcc \
	    -Wl,--version-script=$(ORION)/src/exports.map -I$(ORION)/include $(ORION)/src/*.cpp -ldl \
	    -o $(ORION)/build/libgpu_scheduler.so; fi
	@echo "LD_PRELOAD=$(CURDIR)/$(ORION)/build/libgpu_scheduler.so"

install: $(INSTALLED)

# A changed list of requirements installs anew.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "== installing vpipe and the tools of its tests into .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,hf]"
	@touch $(INSTALLED)

$(BIN)/mkdocs: $(INSTALLED)
	@echo "== installing MkDocs"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[site]"
	@touch $(BIN)/mkdocs
