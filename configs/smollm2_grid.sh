#!/usr/bin/env bash
# Drafters for SmolLM2, from its answers to the tables: one stage per command. The answers come from
# configs/smollm2_answers.sh.
#
#     bash configs/smollm2_grid.sh STAGE [FLAGS OF train.grid, such as --report]
#
#     target     the target as a folder of float32 weights, and EAGLE-3's draft vocabulary
#     rates      learning rates per kind; the best ones belong into configs/smollm2_matched.py
#     first      MoA, EAGLE-3 and the small Llama, seed 0
#     rest       EAGLE-2, N = 3, MoA with the paper's losses, seed 0, and prompt lookup
#     second     MoA, EAGLE-3, the small Llama, EAGLE-2 and N = 3, seed 1
#     ablations  MoA with the last layer, and with the mean over layers, seed 0
#     ideas      MoA with norms, and with a second pass for first tokens, seed 0
#     speed      tokens/s of the drafters of seed 0, on a quiet machine
#     report     the tables of what is finished, without training or decoding
#
# The same command resumes an interrupted stage. Each stage begins with `target`, and leaves out
# what is finished. Target, cache, runs and report.md are in runs/smollm2.
set -euo pipefail
stage=${1:?name a stage: target rates first rest second ablations ideas speed report}
python=${PYTHON:-python} work=runs/smollm2 data=train/data/smollm2/train.jsonl.gz

[ -e $data ] || {
    echo "smollm2_grid.sh: no $data; make it with bash configs/smollm2_answers.sh" >&2
    exit 2
}
[ -e $work/target ] || "$python" -m infer.convert --pair smollm2 --dtype float32 \
    --output $work/target
[ -e $work/vocabulary ] || "$python" -m train.vocabulary --target $work/target --corpus $data \
    --size 8192 --output $work/vocabulary

grid() { # CONFIG [FLAGS]
    "$python" -m train.grid --config "configs/smollm2_$1.py" --target-cache $work/cache \
        --target-cache-dtype bfloat16 --target-cache-gb 64 "${@:2}"
}

case $stage in
target) ;;
rates) grid rates --runs 'moa_tokens-*,eagle3-*,llama-*,eagle2-*' "${@:2}" ;;
first) grid matched --runs 'moa_tokens-*-seed0,eagle3-*-seed0,llama-*-seed0' "${@:2}" ;;
rest) grid matched --runs 'eagle2-*seed0,moa_n3_tokens-*seed0,moa-*seed0,lookup' "${@:2}" ;;
second)
    runs=$(printf '%s-*seed1,' moa_tokens eagle3 llama eagle2 moa_n3_tokens)
    grid matched --runs "$runs" "${@:2}"
    ;;
ablations) grid matched --runs 'moa_last-*-seed0,moa_mean-*-seed0' "${@:2}" ;;
ideas) grid matched --runs 'moa_norms-*-seed0,moa_first_tokens-*-seed0' "${@:2}" ;;
speed)
    drafts=()
    for folder in $work/matched/*-seed0; do
        name=${folder##*/}
        [ -e "$folder/drafter" ] && drafts+=(--draft "${name%%-*}=$folder/drafter")
    done
    "$python" -m infer.evaluate --target $work/target --suite paper --limit 5 --modes chain,tree \
        --depth 5 --breadth 4 --total-tokens 16 --max-new-tokens 128 \
        --output $work/speed "${drafts[@]}"
    ;;
report) grid matched --report ;;
*)
    echo "no stage $stage: choose among target rates first rest second ablations ideas speed report" >&2
    exit 2
    ;;
esac
