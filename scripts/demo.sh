#!/usr/bin/env bash
# Answers the bundled prompts with SmolLM2-135M-Instruct: bash scripts/demo.sh
source "$(dirname "$0")/environment.sh" gguf
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
"$PYTHON" scripts/generate_batch.py --model smollm2-135m-instruct --input scripts/prompts.jsonl \
    --output "$output/answers.jsonl" --max-model-len 1024 --max-num-seqs 8 --max-num-batched-tokens 512 --print
