#!/usr/bin/env bash
# Everything that an hour on a machine with an NVIDIA GPU should be used for, in stages of under nine minutes.
#
#   bench/gpu.sh prepare      where there is a network: collect sources and wheels in .gpu/carry (about 30 MB)
#   bench/gpu.sh STAGE        on the GPU machine, which needs no network: run one stage
#   bench/gpu.sh next         run the stages that are not done yet, one after another, until the time is up
#   bench/gpu.sh status       list the stages
#
# The GPU machine needs this checkout with .gpu/carry in it, Linux on x86-64, a CUDA toolkit (nvcc on PATH), a C++
# compiler, cmake, ninja, and a Python of the version GPU_PYTHON with venv, scikit-build-core and the packages of
# HAS below.
#
# A finished stage is not run again. The build is continued where it was stopped: run the stage again until it is
# done. What a stage leaves is in two folders of the checkout that git ignores:
#   .gpu/state     virtual environment, build folder, models, which stages are done; lost with the machine
#   $OUT           one .log for each stage, tests/ with one for each file of tests, and the .json of each benchmark
#                  (default: .gpu/results)
# Where the machine may be lost between stages, `pack` writes what was built to $OUT in parts of 15 MiB. Copied into
# .gpu/carry/built, they save the stages `build` and `peers` on the next machine with the same Python and CUDA.
#
# Variables:
#   GPU_ARCH      CUDA architecture to build for (default: 90, an H100 or H200)
#   GPU_SECONDS   time that an invocation may take (default: 530)
#   GPU_PYTHON    Python version of the GPU machine, for the wheels (default: 3.12)
#   GPU_SMALL, GPU_LARGE   models of the benchmarks (default: the shapes qwen3-0.6b and qwen3-8b)
#   GPU_PAIRS     pairs of each workload (default: 4)
#   GPU_FLAGS     flags of both servers (default: -ngl 99)
#   CMAKE_ARGS    replaces -DGGML_CUDA=on and the architecture, for example for a trial without a GPU
#
# Tried so far, on two CPU cores without a GPU (CMAKE_ARGS empty, GPU_PYTHON=3.11, both models the 60m shape, one
# pair): prepare, info, venv, build (stopped and continued), install, peers, models, tests, small-decode. CUDA, the 8B
# shape, the other benchmarks and `pack` have not been tried anywhere yet. `layouts` with the flags below has been, on
# two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/.."

ROOT=$PWD
CARRY=$ROOT/.gpu/carry
STATE=$ROOT/.gpu/state
OUT=${OUT:-$ROOT/.gpu/results}
PYTHON=$STATE/venv/bin/python
GPU_SECONDS=${GPU_SECONDS:-530}
GPU_PYTHON=${GPU_PYTHON:-3.12}
GPU_FLAGS=${GPU_FLAGS:--ngl 99}
SMALL=${GPU_SMALL:-qwen3-0.6b}
LARGE=${GPU_LARGE:-qwen3-8b}
VERSION=$(sed -n 's/^llama[-_]cpp[-_]python==//p' .ci/constraints.txt)
STAGES="info venv build install peers models tests"
STAGES="$STAGES small-chat small-decode small-agent large-chat large-decode large-agent"
STAGES="$STAGES large-conversations large-layouts"

# Packages that are large and that a Python for CUDA work has already, or that nothing here uses.
HAS="numpy matplotlib pillow fonttools contourpy kiwisolver"
UNUSED="torch tokenizers mypy mypy_extensions ast_serialize librt ruff import-linter grimp openai jiter"
UNUSED="$UNUSED llama_cpp_python"

export XDG_CACHE_HOME=$STATE/cache PYTHONPATH=$ROOT PYTHONUNBUFFERED=1

main() {
    stage=${1:-help}
    case " $STAGES " in
    *" $stage "*) run_stage "$stage" ;;
    *)
        case $stage in
        prepare | pack | next) "$stage" ;;
        status) for each in $STAGES; do echo "$each: $(is_done "$each" && echo done || echo open)"; done ;;
        *) sed -n '2,/^set -euo/p' "$0" | sed '$d; s/^# \{0,1\}//' && exit 2 ;;
        esac
        ;;
    esac
}

is_done() { [ -e "$STATE/done/$1" ]; }

# At least 1, since `timeout 0` would set no limit.
seconds_left() { echo $((GPU_SECONDS > SECONDS ? GPU_SECONDS - SECONDS : 1)); }

run_stage() {
    stage=$1
    mkdir -p "$STATE/done" "$OUT"
    if is_done "$stage"; then
        echo "gpu: $stage is done already (rm .gpu/state/done/$stage to run it again)"
        return
    fi
    echo "gpu: $stage, at most $(seconds_left) s"
    status=0
    # A shell of its own, since `set -e` does nothing in a function whose status is looked at.
    timeout --kill-after=10 "$(seconds_left)" bash "$0" _ "$stage" "$(seconds_left)" 2>&1 |
        tee "$OUT/$stage.log" || status=$?
    if [ $status -eq 124 ] || [ $status -eq 137 ]; then
        echo "gpu: $stage is not done within $GPU_SECONDS s: run it again"
        exit 3
    elif [ $status -ne 0 ]; then
        echo "gpu: $stage failed with status $status, see $OUT/$stage.log" >&2
        exit 1
    fi
    touch "$STATE/done/$stage"
    for each in $STAGES; do
        is_done "$each" || { echo "gpu: $stage is done after $SECONDS s; next: bench/gpu.sh $each" && return; }
    done
    echo "gpu: all stages are done; results are in $OUT"
}

next() {
    for stage in $STAGES; do
        is_done "$stage" && continue
        [ "$(seconds_left)" -gt 60 ] || { echo "gpu: time is up; next: bench/gpu.sh $stage" && exit 3; }
        run_stage "$stage"
    done
}

# --- where there is a network ---------------------------------------------------------------------

prepare() {
    python=$ROOT/.venv/bin/python
    [ -x "$python" ] || python=python3
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    rm -rf "$CARRY/wheels" && mkdir -p "$CARRY/wheels"

    "$python" -m pip download -q --no-deps --no-binary llama-cpp-python "llama_cpp_python==$VERSION" -d "$work"
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
    source=$work/llama_cpp_python-$VERSION
    (
        cd "$source/vendor/llama.cpp"
        rm -rf benches conversion docs examples gguf-py media models tests
        # The web UI but for the two templates that stand for it where it is left out.
        find tools/ui -type f ! -name '*.in' ! -name CMakeLists.txt -delete
        cd ggml/src
        for backend in cann et hexagon metal opencl openvino sycl virtgpu vulkan webgpu zdnn; do
            rm -rf "ggml-$backend"
        done
    )
    find "$source" -name '.git*' -prune -exec rm -rf {} +
    rm -rf "$source/docs" "$source/examples" "$source/tests"
    tar -C "$work" -cJf "$CARRY/source.tar.xz" "llama_cpp_python-$VERSION"

    skipped=$(printf '%s\n' $HAS $UNUSED | paste -sd'|')
    grep -v -i -E "^($skipped)==" .ci/constraints.txt >"$work/wheels.txt"
    platforms=""
    for libc in 5 12 17 24 27 28 31 34 35; do platforms="$platforms --platform manylinux_2_${libc}_x86_64"; done
    "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$GPU_PYTHON" \
        $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        -d "$CARRY/wheels" -r "$work/wheels.txt"
    du -sh "$CARRY"
    echo "gpu: copy this checkout with .gpu/carry to the GPU machine, then: bench/gpu.sh next"
}

# --- stages ---------------------------------------------------------------------------------------

stage_info() {
    nvidia-smi || echo "no GPU"
    nvcc --version || echo "no nvcc"
    python3 --version
    nproc
    free -g
    df -h .
}

stage_venv() {
    python3 -m venv --clear "$STATE/venv"
    # Not --system-site-packages: where python3 itself is of a virtual environment, that would leave out its packages.
    python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' \
        >"$("$PYTHON" -c 'import site; print(site.getsitepackages()[0])')/parent.pth"
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile "$CARRY"/wheels/*.whl
    if [ -d "$CARRY/built" ]; then
        cat "$CARRY"/built/built.part* | tar -xJ -C "$STATE"
        touch "$STATE/done/build" "$STATE/done/peers"
    fi
}

stage_build() {
    if [ ! -d "$STATE/source" ]; then
        mkdir -p "$STATE/unpacked"
        tar -xJf "$CARRY/source.tar.xz" -C "$STATE/unpacked"
        mv "$STATE/unpacked/llama_cpp_python-$VERSION" "$STATE/source"
        mkdir -p "$XDG_CACHE_HOME/llamaslot/peers"
        ln -sfn "$STATE/source/vendor/llama.cpp" "$XDG_CACHE_HOME/llamaslot/peers/llama.cpp-$VERSION"
    fi
    # The build folder outlives a build that was stopped: ninja continues with what is missing.
    export SKBUILD_BUILD_DIR=$STATE/build CMAKE_GENERATOR=Ninja
    export CMAKE_ARGS=${CMAKE_ARGS--DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=${GPU_ARCH:-90}}
    "$PYTHON" -m pip wheel -v --no-index --no-deps --no-build-isolation -w "$STATE/wheel" "$STATE/source"
}

stage_install() {
    "$PYTHON" -m pip install -q --no-index --no-deps --force-reinstall "$STATE"/wheel/llama_cpp_python-*.whl
    "$PYTHON" -c 'import llama_cpp; print("GPU:", llama_cpp.llama_supports_gpu_offload())
print(llama_cpp.llama_print_system_info().decode())'
}

stage_peers() {
    "$PYTHON" -c 'from bench.peers import build; build.llama_server(); build.batched_bench()'
}

stage_models() {
    for model in "$SMALL" "$LARGE"; do
        "$PYTHON" -c 'import sys; from bench.report import model_file; print(model_file(sys.argv[1]))' "$model"
    done
}

stage_tests() {
    # llama.cpp writes why it aborts to stderr, which pytest-xdist drops with the worker: each file has a process and
    # a log of its own, in which nothing is captured. All files run, whatever fails.
    mkdir -p "$OUT/tests"
    find tests/backend tests/demo -name 'test_*.py' -print0 | sort -z | xargs -0 -P 8 -I {} bash -c '
        "$0" -X faulthandler -m pytest -n 0 --capture=no -p no:cacheprovider "$1" >"$2/$(basename "$1" .py).log" 2>&1 ||
            echo "gpu: $1 failed with status $?, see tests/$(basename "$1" .py).log"' "$PYTHON" {} "$OUT/tests" |
        tee "$OUT/tests/failed"
    [ ! -s "$OUT/tests/failed" ]
}

stage_small-chat() { compare "$SMALL" chat "fan-out cold" "fan-out warm"; }
stage_small-decode() { compare "$SMALL" "decode 1" "decode 8" "decode 32"; }
stage_small-agent() { compare "$SMALL" agent restart; }
stage_large-chat() { compare "$LARGE" chat "fan-out cold" "fan-out warm"; }
stage_large-decode() { compare "$LARGE" "decode 1" "decode 8" "decode 32"; }
stage_large-agent() { compare "$LARGE" agent restart; }
# These two should take under five minutes together; tried nowhere yet.
stage_large-conversations() { GPU_PAIRS=2 compare "$LARGE" "conversations 1" "conversations 2" "conversations 3"; }
stage_large-layouts() {
    results=$STATE/results/$STAGE
    mkdir -p "$results"
    "$PYTHON" -m bench layouts --model "$LARGE" --conversations 8 --max-tokens 3000 --out "$results"
    cp "$results/layouts.json" "$OUT/$STAGE.json"
}

# Run workloads of `bench peers`; pairs that no time is left for are left out.
compare() {
    model=$1
    shift
    only=()
    for workload in "$@"; do only+=(--only "$workload"); done
    results=$STATE/results/$STAGE
    mkdir -p "$results"
    "$PYTHON" -m bench peers --model "$model" "${only[@]}" --repeats "${GPU_PAIRS:-4}" --server="$GPU_FLAGS" \
        --against llama-server --against "llama-server -kvu" --against "llama-server -kvu, slots saved" \
        --against llamaslot --time-limit $((LIMIT - 30)) --out "$results"
    cp "$results/peers.json" "$OUT/$STAGE.json"
}

pack() {
    mkdir -p "$OUT"
    tar -C "$STATE" -cJ wheel source cache/llamaslot/peers | split -b 15M - "$OUT/built.part"
    ls -la "$OUT"/built.part*
}

if [ "${1:-}" = _ ]; then
    STAGE=$2 LIMIT=$3
    "stage_$STAGE"
else
    main "$@"
fi
