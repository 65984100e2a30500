# Every target sets itself up in .venv; a machine needs python3 (3.11 or later) and make.
# The GPU targets are the exception: they run under the machine's own python3, without network.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL_OPTIONS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(INSTALL_OPTIONS)

# What a GPU machine that has torch may lack: of its Python, without what torch itself brings.
GPU_PYTHON ?= 3.12
GPU_WHEELS := .cache/gpu-wheels
GPU_TOOLS := .cache/gpu-tools
GPU_PACKAGES := accelerate annotated-doc annotated-types anyio certifi charset-normalizer click diffusers \
	execnet filelock fsspec h11 httpcore2 httpx2 huggingface-hub hypothesis idna importlib-metadata iniconfig \
	lazy-importer markdown-it-py mdurl packaging peft pillow pluggy psutil pydantic pydantic-core pygments pytest \
	pytest-timeout pytest-xdist pyyaml regex requests rich safetensors shellingham sortedcontainers tokenizers tqdm \
	transformers truststore typer typing-extensions typing-inspection urllib3 zipp
GPU_TESTS ?= $(wildcard tests/test_attend*.py) tests/test_kernels.py tests/test_windows.py
SHARDS ?= 10
GPU_ENV := PYTHONPATH=src:lab/src:$(GPU_TOOLS)
# The sanitizer looks at these alone: torch's own, which compute what is compared with, would take most of the time.
KERNELS = $(shell sed -nE 's/^ *(\w+_kernel)\[.*/\1/p' $$(find src/nearfield/ops -name '*.py') | sort -u)
MEMCHECK = compute-sanitizer --tool memcheck --error-exitcode 1 $(KERNELS:%=--kernel-name kns=%)
LARGE_TESTS := long_sequences or long_map or 65536 or two_billion
sanitized = seq 0 $$(($(1) - 1)) | $(GPU_ENV) PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs --max-procs=$(2) -I{} \
	$(MEMCHECK) $(GPU_PYTEST) --quiet -k '$(3)' --shard {}/$(1)
GPU_PYTEST := $(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark --require-gpu $(GPU_TESTS)

GLUON_TRITONS ?= 3.6.0 3.9.0
GLUON_STAMPS := $(GLUON_TRITONS:%=.cache/triton-%/.installed)

STUDIO := .cache/studio
STUDIO_PINS := gradio==6.31.0 pillow==12.3.0
PACKAGE := .cache/package
SMOKE := .cache/smoke
README := .cache/readme
SMOKE_EXTRAS ?= diffusers,triton
SMOKE_LAB_EXTRAS ?= train
SMOKED ?= torch diffusers
PACKAGES := -c 'import site; print(site.getsitepackages()[0])'

.DEFAULT_GOAL := help
.PHONY: help demo test test-studio check format bench docs package smoke readme test-gpu sanitize-gpu gpu-wheels gpu-tools gluon-compile walk clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: left free, it brings gigabytes of CUDA libraries.
$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[dev]' -e './lab[train,ray,drawings]'
	touch $@

demo: $(STAMP) ## make a picture with dense and with sparse attention (ARGS="--num 4 --steps 16" for more and better)
	$(BIN)/nearfield generate --compare --num 1 --option first=3 --steps 8 --out demo.png $(ARGS)

# Each worker begins with half of the files, so that few of them import, and set up, the same.
test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal --timeout 300

test-studio: $(STUDIO)/.installed ## run the studio in a headless Chromium (it skips without one)
	$(STUDIO)/bin/python -m pytest -k studio tests/test_studio_page.py tests/test_extras.py

# An environment on top of .venv, not in it: Gradio wants an older Pillow and tomlkit than constraints.txt pins.
$(STUDIO)/.installed: $(STAMP)
	rm -rf $(STUDIO)
	$(PYTHON) -m venv $(STUDIO)
	$(abspath $(BIN))/python $(PACKAGES) > $$($(STUDIO)/bin/python $(PACKAGES))/base.pth
	grep -v -e '^pillow==' -e '^tomlkit==' constraints.txt > $(STUDIO)/constraints.txt
	$(STUDIO)/bin/python -m pip install --quiet --disable-pip-version-check -c $(STUDIO)/constraints.txt $(STUDIO_PINS)
	touch $@

check: $(STAMP) ## lint, formatting, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: $(STAMP) ## apply the formatting and the safe lint fixes
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

bench: $(STAMP) ## time attention calls on this machine (ARGS="--quick" for a glance)
	$(BIN)/python -m benchmarks attention $(ARGS)

docs: $(STAMP) ## draw the pictures of the documentation and build its site
	$(BIN)/python docs/build.py
	$(BIN)/mkdocs build --quiet
	@echo "site/index.html"

# Tried in an environment that has what .venv has, but neither the checkout nor what is known of it there; from a folder
# outside. First the library alone, then with the lab. The wheels with the lowest diffusers, the sdists with the newest:
# those are small, other torches are not (`make smoke`).
package: $(STAMP) ## build wheels and sdists into dist/, install and try them, with the lowest and the newest diffusers
	rm -rf dist $(PACKAGE)
	$(BIN)/python -m hatchling build -t wheel -t sdist -d dist
	cd lab && $(abspath $(BIN))/python -m hatchling build -t wheel -t sdist -d ../dist
	$(PYTHON) -m venv $(PACKAGE)
	mkdir $(PACKAGE)/base
	find "$$($(abspath $(BIN))/python $(PACKAGES))" -mindepth 1 -maxdepth 1 ! -name '*nearfield*' \
		-exec ln -s {} $(PACKAGE)/base \;
	echo "$(abspath $(PACKAGE))/base" > $$($(PACKAGE)/bin/python $(PACKAGES))/base.pth
	cp tests/package_smoke.py $(PACKAGE)/smoke.py
	set -e; cd $(PACKAGE); \
	install() { bin/python -m pip install --quiet --disable-pip-version-check "$$@"; }; \
	built() { install --no-index --no-deps --no-build-isolation --force-reinstall "$$1"; }; \
	try() { library=$$1; lab=$$2; shift 2; bin/python -m pip uninstall --quiet --quiet --yes nearfield-lab; \
		built $$library; bin/python smoke.py library "$$PWD/bin/nearfield" "$$@"; \
		built $$lab; bin/python smoke.py lab "$$PWD/bin/nearfield" "$$@"; }; \
	lowest=$$(bin/python ../../.ci/lowest.py diffusers); \
	install $$lowest; try ../../dist/nearfield-*.whl ../../dist/nearfield_lab-*.whl $$lowest; \
	install --upgrade diffusers; try ../../dist/nearfield-*.tar.gz ../../dist/nearfield_lab-*.tar.gz

# Two environments from nothing, torch included: from PyPI alone that is gigabytes of CUDA libraries each.
smoke: package ## try both wheels in clean environments: the lowest versions of everything, and the newest
	set -e; lowest="$$($(BIN)/python .ci/lowest.py)"; \
	for versions in lowest newest; do \
		rm -rf $(SMOKE)-$$versions; $(PYTHON) -m venv $(SMOKE)-$$versions; \
		cp tests/package_smoke.py $(SMOKE)-$$versions/smoke.py; \
		if test $$versions = lowest; then echo "$$lowest"; fi > $(SMOKE)-$$versions/constraints.txt; \
		pins=$$(if test $$versions = lowest; then $(BIN)/python .ci/lowest.py $(SMOKED); fi); \
		(cd $(SMOKE)-$$versions; \
		install() { bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$@"; }; \
		install "$$(echo ../../dist/nearfield-*.whl)[$(SMOKE_EXTRAS)]"; \
		bin/python smoke.py library "$$PWD/bin/nearfield" $$pins; \
		install "$$(echo ../../dist/nearfield_lab-*.whl)[$(SMOKE_LAB_EXTRAS)]"; \
		bin/python smoke.py lab "$$PWD/bin/nearfield" $$pins); \
	done

# Nothing of .venv is in this environment. torch comes first, as a CPU build, then what README's own line brings; all
# versions are those of constraints.txt.
readme: export PIP_CONSTRAINT = constraints.txt
readme: export PIP_DISABLE_PIP_VERSION_CHECK = 1
readme: ## install the library by README's line (without Triton) and run README's code there, FLUX as a tiny pipeline
	rm -rf $(README)
	$(PYTHON) -m venv $(README)
	@set -e; PATH="$(abspath $(README))/bin:$$PATH"; \
	pip install --quiet $(INSTALL_OPTIONS) torch; \
	line=$$(python tests/readme_smoke.py install README.md); \
	eval "$$line --quiet $(INSTALL_OPTIONS)"; \
	cd $(README); OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python -I ../../tests/readme_smoke.py run ../../README.md 2> errors \
		|| { cat errors; exit 1; }

walk: $(STAMP) ## delete a method in a copy of the tree, and print what still names it
	$(BIN)/python tests/deletion_walk.py $(ARGS)

gluon-compile: $(STAMP) $(GLUON_STAMPS) ## compile the kernels under each supported Triton, without a GPU
	@set -e; for version in $(GLUON_TRITONS); do \
		echo "compile check under Triton $$version"; \
		PYTHONPATH=.cache/triton-$$version:src $(BIN)/python tests/compile_check.py; \
	done

# Beside the virtual environment, not in it: constraints.txt pins the one Triton that lives there.
.cache/triton-%/.installed: | $(BIN)/python
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) triton==$*
	touch $@

test-gpu: ## run the GPU tests under the machine's own python3
	$(GPU_ENV) $(GPU_PYTEST)

# The caching allocator would hide a read past the end of a tensor, but graphs need it: their tests come apart. One
# process takes most of an hour, waiting for itself: so there are several, each with its share of the tests. Of the
# tests that take gigabytes two run at a time, and few in one process: after many of them the GPU's memory was full.
sanitize-gpu: ## run the GPU tests under compute-sanitizer, in SHARDS processes
	$(call sanitized,$(SHARDS),$(SHARDS),not graph and not ($(LARGE_TESTS)))
	$(call sanitized,12,2,$(LARGE_TESTS))
	$(GPU_ENV) $(MEMCHECK) $(GPU_PYTEST) --quiet -k graph

gpu-wheels: $(STAMP) ## fetch what a GPU machine without network may lack, as wheels to carry there
	rm -rf $(GPU_WHEELS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --dest $(GPU_WHEELS) \
		--python-version $(GPU_PYTHON) --only-binary=:all: --no-deps -c constraints.txt $(GPU_PACKAGES)
	du -sh $(GPU_WHEELS)

gpu-tools: ## on that machine: unpack the wheels, for `make test-gpu` and for PYTHONPATH
	rm -rf $(GPU_TOOLS)
	$(PYTHON) -c 'import sys, zipfile; [zipfile.ZipFile(w).extractall("$(GPU_TOOLS)") for w in sys.argv[1:]]' $(GPU_WHEELS)/*.whl

clean: ## remove everything the targets made
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find src lab tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
