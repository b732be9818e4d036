#!/usr/bin/env bash
# The data of a drafter for SmolLM2: prompts, the target's answers, and their token ids in one
# folder, train/data/smollm2. Sources have licences that permit shipping weights and these files.
#
#     bash configs/smollm2_answers.sh [FLAGS OF train.regenerate, such as --batch 64]
#     SHARDS=2 bash configs/smollm2_answers.sh ...    a process on each of the first two cores
#
# The same command resumes an interrupted run. WORK holds the prompts and the answers with their
# text, by default runs/smollm2; OUTPUT is another folder for the token ids.
set -euo pipefail
work=${WORK:-runs/smollm2} output=${OUTPUT:-train/data/smollm2} shards=${SHARDS:-1}
without=data:specbench
mkdir -p "$work" "$output"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # Ctrl-C does not reach processes in the background

corpus() { # OUTPUT TABLE [FLAGS]
    [ -e "$1" ] || "${PYTHON:-python}" -m train.corpus --output "$1" --without "$without" \
        "${@:3}" >"$2"
}

prompts() { # NAME SOURCES [FLAGS OF train.corpus]
    corpus "$work/$1_prompts.jsonl" "$work/$1_prompts.md" --sources "$2" "${@:3}"
}

answer() { # NAME FOLDER [FLAGS OF train.regenerate]
    local shard pin pids=() pid
    mkdir -p "$work/$2"
    for shard in $(seq 0 $((shards - 1))); do
        [ -e "$work/$2/$1-$(printf %05d-of-%05d "$shard" "$shards").jsonl" ] && continue
        pin=(taskset -c "$shard")
        [ "$shards" -gt 1 ] || pin=()
        "${pin[@]}" "${PYTHON:-python}" -m train.regenerate --pair smollm2 \
            --prompts "$work/$1_prompts.jsonl" --output "$work/$2/$1.jsonl" \
            --shard "$shard/$shards" --max-prompt 256 --max-new-tokens 256 "${@:3}" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
}

one='gsm8k-train=35,gpteacher-codegen=35,gpteacher-roleplay=22,mbpp=11,self-instruct-seed,'
one+='arena-hard-answers=17,flan-cot-aqua=15,flan-cot-ecqa=10,flan-cot-creak=8,flan-cot-qasc=8,'
one+='flan-cot-sensemaking=5,flan-cot-strategyqa=15,medquad=20,tldr-pages=15,scitldr-a=25,'
one+='p3-ropes=10,p3-quoref=8,p3-cosmos_qa=7,oasst-eval,open-assistant-sample,mt-bench-101=16,'
one+='botbots=20,glaive-demo,star=8,multiwoz-2.1-val-test=12,synthetic-persona-chat=10,'
one+='self-dialogue-corpus=10'
prompts validation "$one" --records data:chat/validation.jsonl --turns 4
answer validation validation "$@"

many='gsm8k-train=700,gpteacher-codegen=700,gpteacher-roleplay=600,mbpp=250,self-instruct-seed,'
many+='arena-hard-answers=450,flan-cot-aqua=250,flan-cot-ecqa=150,flan-cot-creak=120,'
many+='flan-cot-qasc=120,flan-cot-sensemaking=80,flan-cot-strategyqa=250,medquad=350,'
many+='tldr-pages=200,scitldr-a=400,p3-ropes=120,p3-quoref=80,p3-cosmos_qa=150,oasst-eval,'
many+='open-assistant-sample,mt-bench-101=600,botbots=300,glaive-demo=120,star=120,'
many+='synthetic-conversations-1k,multiwoz-2.1-val-test=200,synthetic-persona-chat=150,'
many+='self-dialogue-corpus=150'
prompts train "$many" --records data:chat/train.jsonl.gz --turns 4
answer train train "$@"

# Answers that go on where the target would stop, as clients with ignore_eos receive them. They have
# no text, so the table of train.corpus leaves them out; their prompts are checked.
some='gsm8k-train=120,gpteacher-codegen=120,gpteacher-roleplay=40,medquad=40,mt-bench-101=80,'
some+='botbots=40,flan-cot-ecqa=40,multiwoz-2.1-val-test=40'
without=data:specbench,$work/train_prompts.jsonl prompts past_end "$some" --seed 1 --turns 1 \
    --records data:chat/train.jsonl.gz
answer past_end past_end --ignore-stop "$@"

corpus "$output/validation.jsonl.gz" "$output/validation.md" --records "$work/validation"
corpus "$work/train.jsonl.gz" "$output/train.md" --records "$work/train" --ids-only
gzip --no-name --stdout "$work"/past_end/*.jsonl | cat "$work/train.jsonl.gz" - >"$output/train.jsonl.gz"
