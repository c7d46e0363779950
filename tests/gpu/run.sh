#!/usr/bin/env bash
# The tests that need a GPU, on a machine that may have no network and none of pdrt's libraries.
#
#   tests/gpu/run.sh pack FOLDER     where there is a network: put the wheels that a machine with a
#                                    CUDA build of PyTorch may lack into FOLDER (some 22 MB);
#                                    PYTHON_VERSION=3.12 says for which Python
#   tests/gpu/run.sh [pytest …]      on the GPU: install from WHEELS=FOLDER, if that is given, into a
#                                    folder that is deleted afterwards; then run doctor, tests, figures
#
# Under five minutes on one GPU. PYTHON=… names an interpreter that has PyTorch 2.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
SECONDS_MAX=240
# What PyTorch's own environment rarely has, with versions from constraints.txt.
LACKING=(msgspec pyzmq uvloop transformers gguf starlette uvicorn httptools xxhash pytest hypothesis)
IMPORTS=(torch numpy msgspec zmq uvloop transformers tokenizers safetensors accelerate gguf jinja2
    starlette uvicorn httptools rich packaging xxhash pytest hypothesis)

pack() { # pack FOLDER
    local name pins=()
    for name in "${LACKING[@]}"; do
        pins+=("$(grep -i "^$name==" constraints.txt || echo "$name")")
    done
    local platforms=()
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${name}_x86_64")
    done
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest "$1" \
        --python-version "${PYTHON_VERSION:-3.12}" --implementation cp "${platforms[@]}" "${pins[@]}"
    du -sh "$1"
}

install() { # install FOLDER
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" "$1"/*.whl
    export PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH}
}

missing() {
    "$PYTHON" - "${IMPORTS[@]}" <<'END'
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
END
}

if [[ ${1:-} == pack ]]; then
    pack "${2:?tests/gpu/run.sh pack FOLDER}"
    exit
fi

SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
if [[ -n ${WHEELS:-} ]]; then install "$WHEELS"; fi
lacking=$(missing)
if [[ -n $lacking ]]; then
    echo "tests/gpu/run.sh: $PYTHON has no $lacking; see \`tests/gpu/run.sh pack\`" >&2
    exit 2
fi

"$PYTHON" - <<'END'
import sys, torch, transformers
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}")
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU")
END
"$PYTHON" -m pdrt doctor --port 0 --worker-port 0 | grep -E '^(ok|warning|fails) +(torch|gpu|cuda|pidfd|processes)' || true
status=0
# -rA: what a trial of the fence saw stands in the output of the tests that passed too.
timeout -k 5 "$SECONDS_MAX" "$PYTHON" -m pytest -m gpu -rA tests/gpu "$@" || status=$?
if ((status == 0)); then "$PYTHON" -m tests.gpu.bandwidth; fi
exit "$status"
