#!/usr/bin/env bash
# Tests and measures elasticrun on one GPU in at most eight minutes, on a bare machine.
#
#   bash benchmarks/gpu/run.sh [--small]
#
# It takes the Python that has torch (PYTHON=python3), and installs what else is missing
# in build/gpu-packages, without a network from the wheels in build/wheels:
#
#   pip download -d build/wheels cloudpickle psutil pytest hypothesis
#
# Each part has a time limit and a file of JSON lines in $OUT, or benchmarks/results/gpu;
# what fails does not end the others. The most telling parts come first. --small tries
# everything out on a CPU.
set -u
cd "$(dirname "$0")/../.." || exit

PYTHON=${PYTHON:-python3}
RESULTS=${OUT:-benchmarks/results/gpu}
PACKAGES=$PWD/build/gpu-packages
small=() sizes=(1 8) slack=1
# A machine where it is tried out may be busy.
[ "${1:-}" = --small ] && small=(--small) sizes=(0.05) slack=5
TOTAL=$((470 * slack))  # Seconds for all parts.
mkdir -p "$RESULTS" "$PACKAGES"
export PYTHONPATH=$PWD:$PACKAGES${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=4

missing=()
for name in torch numpy cloudpickle psutil pytest hypothesis; do
  "$PYTHON" -c "import $name" 2>/dev/null || missing+=("$name")
done
if [ ${#missing[@]} -gt 0 ]; then
  from=()
  [ -d build/wheels ] && from=(--no-index --find-links build/wheels)
  "$PYTHON" -m pip install -q --target "$PACKAGES" "${from[@]}" "${missing[@]}" || exit
fi
"$PYTHON" -c 'import torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "without a GPU"
print("torch", torch.__version__, gpu)' || exit

summary=()
part() {  # part NAME SECONDS COMMAND...
  local name=$1 limit=$(($2 * slack)) begin=$SECONDS code=0
  local out=$RESULTS/$name
  shift 2
  rm -f "$out.json" "$out.log"
  ((limit > TOTAL - begin)) && limit=$((TOTAL - begin))
  if ((limit < 10)); then
    summary+=("$name: no time left")
    return
  fi
  # SIGINT lets pytest sum up.
  GPU_PART=$name timeout -s INT -k 5 "$limit" "$@" >"$out.json" 2>"$out.log" || code=$?
  # What a part leaves behind would take the GPU from the next one.
  grep -lzx "GPU_PART=$name" /proc/[0-9]*/environ 2>/dev/null |
    cut -d / -f 3 | xargs -r kill -9 2>/dev/null
  [ -s "$out.json" ] || rm -f "$out.json"
  summary+=("$name: $((SECONDS - begin)) s, exit code $code")
  ((code == 0)) || summary+=("$(tail -n 4 "$out.log")")
}

part tests 100 "$PYTHON" -m pytest -v --tb=short -p no:cacheprovider tests/gpu
mv "$RESULTS/tests.json" "$RESULTS/tests.log"
part step 140 "$PYTHON" benchmarks/gpu/step.py "${small[@]}" --seconds $((135 * slack))
part rescue 45 "$PYTHON" benchmarks/gpu/rescue.py "${small[@]}"
part save 80 "$PYTHON" benchmarks/gpu/save.py --gibibytes "${sizes[@]}"
part bits 40 "$PYTHON" benchmarks/gpu/bits.py
part restart 80 "$PYTHON" benchmarks/gpu/restart.py "${small[@]}"

cat "$RESULTS"/*.json 2>/dev/null
tail -n 3 "$RESULTS/tests.log"
printf '%s\n' "${summary[@]}"
