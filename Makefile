# Two commands: `make bench` and `make test`; while working, `make check`. They make .venv first, when it is missing,
# stale or half made.
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
OUT     ?= results
CUBINS  ?= --preset all --dtype bf16,f16 --arch sm_90a
PTX     ?= --B 1,4 --H 16 --N 512,2048,8192 --D 64,128,256 --dtype bf16,f16 --arch sm_90a

BIN  := $(VENV)/bin
TEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What `make check` tests: of every package, files whose tests take seconds.
CHECK := api/test_functional.py bench/test_bench_flops.py bench/test_bench_grid.py bench/test_bench_results.py \
  bench/test_bench_timing.py benchmarks/test_results_name_scripts.py cli/test_cli.py cli/test_completion.py \
  core/test_dispatch.py core/test_problem.py cuda inspect/test_doctor.py \
  integrations/test_flash_attn_functions.py integrations/test_huggingface.py jit/test_jit_budget.py \
  kernels/mma/test_mma_grid.py kernels/test_draws.py kernels/test_features.py models ops/test_ops.py \
  reference/test_masks.py docs/test_vocabulary.py docs/test_architecture_page.py docs/test_file_sizes.py \
  lessons/test_lessons.py profile test_imports.py tools/test_fa4_cache.py tuning/test_by_hand.py

.PHONY: help bench check test lint format readme docs compile wheel wheel-cubins ahead gpu clean distclean venv
.PHONY: venv-test

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## */\t/' | expand -t 14

bench: venv     ## the main job; options with ARGS="--N 1024,2048 --check"
	$(BIN)/flashlane bench $(ARGS)

check: lint     ## lint, and tests of every package that take seconds: under 2 minutes on 2 cores
	$(TEST) -m "not gpu and not slow" $(addprefix tests/,$(CHECK)) $(ARGS)

test: lint      ## everything that needs no GPU
	$(TEST) -m "not gpu" $(ARGS)

lint: venv-test ## style: ruff check and ruff format --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv-test ## put the style right where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: venv    ## write README.md's generated parts again
	$(BIN)/python benchmarks/scripts/readme_tables.py

docs: venv-test ## build the documentation site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

compile: venv-test ## compile every kernel for every architecture and read the compiler's reports
	$(BIN)/flashlane compile --all $(ARGS)

wheel: venv-test ## without a GPU: flashlane's wheel with the PTX of the kernels that PTX and CUBINS ask for
	rm -rf build/lib src/flashlane/ptx
	$(BIN)/flashlane prebuild $(PTX) --causal --ptx --out src/flashlane/ptx
	$(BIN)/flashlane prebuild $(PTX) --no-causal --lists --ptx --out src/flashlane/ptx
	$(BIN)/flashlane prebuild $(CUBINS) --ptx --out src/flashlane/ptx
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --no-index --quiet --wheel-dir dist .
	rm -rf build/lib src/flashlane/ptx

wheel-cubins: venv-test ## without a GPU: the wheel flashlane-cubins, of the kernels that CUBINS asks for, into dist
	rm -rf build/cubins
	$(BIN)/flashlane prebuild $(CUBINS) --out build/cubins
	$(BIN)/python tools/cubin_wheel.py build/cubins --out dist

ahead: venv-test ## without a GPU: compile what `make gpu` runs on a Hopper one, and pack it for that machine
	$(BIN)/python tools/ahead.py $(ARGS)

gpu:            ## on a GPU, with python3 as it is (installs nothing): the GPU tests, then every measurement, to OUT
	mkdir -p $(OUT)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ARGS)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/correctness.py --out $(OUT)/correctness.json
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/sanitize.py --out $(OUT)/sanitizer.json
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/baseline.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/baseline_logs.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/mma_targets.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/ncu_conflicts.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/ncu_bounds.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/lessons_gpu.py $(OUT)/lessons.json
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/hopper_forward.py --out $(OUT)/hopper_forward.json
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/hopper_backward.py --out $(OUT)/hopper_backward.json
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/triton_targets.py --out $(OUT) --directions forward,backward,both
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/decode.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/host_cost.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/first_call.py --out $(OUT) --peers --repeats 3 --seconds 400
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/auto_check.py --out $(OUT)/auto_check.json
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/cli_gpu.py --out $(OUT)
	PYTHONPATH=src $(PYTHON) benchmarks/scripts/suites.py --out $(OUT)

clean:          ## remove what builds and tests leave; keeps .venv
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)

venv:
	@$(PYTHON) tools/venv.py $(VENV)

venv-test:
	@$(PYTHON) tools/venv.py $(VENV) test
