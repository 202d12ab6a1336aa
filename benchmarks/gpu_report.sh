#!/usr/bin/env bash
# What plans bring on a GPU, in one call under ten minutes: kernels against fp64, tests that need CUDA, decode speed and
# largest batches of the shape of Llama-3.1-8B at 20% kept, scoring beside prefill, and the search of budgets.
#
#     benchmarks/gpu_report.sh [runs/gpu]     what is printed, and JSON that `kvsearch show` and `report` read
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-runs/gpu}
BIN=${BIN:-.venv/bin}
mkdir -p "$OUT"
"$BIN/python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "there is no CUDA device: nothing was measured")'

part() { printf '\n== %s\n' "$1"; }
bench() { # NAME, then options of bench
    local name=$1
    shift
    "$BIN/kvsearch" bench --shape llama-3.1-8b --device cuda --ratio 0.8 --skewed --new-tokens 32 --rounds 3 --json "$@" \
        >"$OUT/$name.json" && "$BIN/kvsearch" show "$OUT/$name.json"
}

part "tests that need CUDA"
TRITON_INTERPRET=0 "$BIN/python" -m pytest -q -m cuda tests || echo "(some failed)"
part "32k, batch 8: DynamicCache, StaticCache, prefill only"
bench batch8-snapkv --length 32768 --batch 8 --policy snapkv
part "32k, both phases"
bench both-h2o --length 32768 --batch 1,8 --policy h2o --phases both
bench both-streaming --length 32768 --batch 8 --policy streaming --phases both
part "128k, batch 1"
bench long-snapkv --length 131040 --batch 1 --policy snapkv
part "largest batch at 32k"
bench largest --length 32768 --batch 1 --policy snapkv --largest-batch
part "scoring beside prefill"
"$BIN/python" benchmarks/bench_policies.py --device cuda --dtype bfloat16
part "search"
"$BIN/python" benchmarks/bench_search.py --device cuda --shape llama-3.1-8b --length 8192 --answer 64 --budget 512 --naive 1
"$BIN/kvsearch" report "$OUT"/*.json -o "$OUT/report.html" --title "kvsearch on a GPU"
