#!/usr/bin/env bash
# Tests and measures elasticrun on one GPU in at most eight minutes, on a bare machine.
#
#   bash benchmarks/gpu/run.sh [--small]
#
# It takes the Python that has torch (PYTHON=python3), and installs what else is missing
# beside it, without a network from the wheels in build/wheels:
#
#   pip download -d build/wheels cloudpickle psutil pytest hypothesis
#
# Each part has a time limit and a file of JSON lines in $OUT, or benchmarks/results/gpu;
# what fails does not end the others. The most telling parts come first. --small tries
# everything out on a CPU.
set -u
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
RESULTS=${OUT:-benchmarks/results/gpu}
PACKAGES=$PWD/build/gpu-packages
small=()
sizes=(1 8)
[ "${1:-}" = --small ] && small=(--small) && sizes=(0.05)
mkdir -p "$RESULTS" "$PACKAGES"
export PYTHONPATH=$PWD:$PACKAGES${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=4

if ! "$PYTHON" -c "import cloudpickle, hypothesis, psutil, pytest" 2>/dev/null; then
  from=()
  [ -d build/wheels ] && from=(--no-index --find-links build/wheels)
  "$PYTHON" -m pip install -q --target "$PACKAGES" "${from[@]}" \
    cloudpickle psutil pytest hypothesis || exit 1
fi
"$PYTHON" -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "without a GPU")'

codes=()
part() {  # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  timeout -k 5 "$limit" "$@" >"$RESULTS/$name.json" 2>"$RESULTS/$name.log" || code=$?
  [ -s "$RESULTS/$name.json" ] || rm -f "$RESULTS/$name.json"
  codes+=("$name: $((SECONDS - begin)) s, exit code $code")
}

part tests 130 "$PYTHON" -m pytest -q --tb=short -p no:cacheprovider tests/gpu
part step 150 "$PYTHON" benchmarks/gpu/step.py "${small[@]}" --seconds 140
part restart 60 "$PYTHON" benchmarks/gpu/restart.py "${small[@]}"
part save 90 "$PYTHON" benchmarks/gpu/save.py --gibibytes "${sizes[@]}"
part rescue 40 "$PYTHON" benchmarks/gpu/rescue.py "${small[@]}"

printf '%s\n' "${codes[@]}"
mv "$RESULTS/tests.json" "$RESULTS/tests.log" 2>/dev/null && tail -3 "$RESULTS/tests.log"
cat "$RESULTS"/*.json
