#!/usr/bin/env bash
# Answers one shard of the prompts with the target, as data for its drafter.
#
#     TARGET=meta-llama/Meta-Llama-3-8B-Instruct ANSWERS=runs/answers \
#         bash configs/regenerate_shard.sh 3/8 [FLAGS OF train.regenerate]
#
# The answers of all shards are in $ANSWERS/train and, for 512 held-out conversations, in
# $ANSWERS/validation: one target a folder. The same command resumes an interrupted shard, and ends
# at once where the shard is finished. PROMPTS and HELD_OUT name other prompts than UltraChat's.
set -euo pipefail
ultrachat=hub:HuggingFaceH4/ultrachat_200k@8049631c405ae6576f93f445c6b8166f76f5505a
shard=${1:?write I/N, as in 3/8}
printf -v name 'all-%05d-of-%05d.jsonl' "${shard%/*}" "${shard#*/}"

answer() { # PROMPTS FOLDER [FLAGS]
    if [ -e "$2/$name" ]; then
        echo "$2/$name is finished" >&2
        return
    fi
    "${PYTHON:-python}" -m train.regenerate --target "${TARGET:?name the target}" --prompts "$1" \
        --output "$2/all.jsonl" --shard "$shard" --max-prompt 1024 --max-new-tokens 1024 "${@:3}"
}

: "${ANSWERS:?name a folder that all machines share}"
answer "${HELD_OUT:-$ultrachat/test_sft}" "$ANSWERS/validation" --limit 512 "${@:2}"
answer "${PROMPTS:-$ultrachat/train_sft}" "$ANSWERS/train" "${@:2}"
