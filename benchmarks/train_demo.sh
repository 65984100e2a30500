#!/usr/bin/env bash
# Trains the embedded model in slices, on a GPU machine without network that may be lost between them.
#
# Everything that must not travel (photographs, latents, checkpoints with the optimizer's state) stays in a folder of
# that machine, STATE. What must (the averaged model in 8 bits, sample sheets, the log) is collected in files of at most
# 15 MiB. A slice goes on from its checkpoint; on a new machine, from the collected model.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat >&2 <<'END'
usage: benchmarks/train_demo.sh COMMAND ...
  wheels DIR [VERSION]         with network: fetch what a GPU machine with torch may lack, for its Python (3.12)
  stage STATE FILE...          keep files: photographs (.tar), wheels (.whl, unpacked), anything else
  base STATE MINUTES [OPTION]  train at 256 px in STATE/base
  tune STATE MINUTES [OPTION]  tune at 512 px in STATE/tune, starting from STATE/base
  sparse STATE MINUTES [OPTION]   the same with sparse attention, in STATE/sparse
  native STATE MINUTES [OPTION]       train at 256 px with sparse attention from the first step, in STATE/native
  native-tune STATE MINUTES [OPTION]  tune that at 512 px, with sparse attention, too, in STATE/native-tune
  distill STATE MINUTES [OPTION]  a LoRA for sparse attention, in STATE/distill, for the model of STATE/tune
  sample STATE RUN DIR [OPTION]   pictures by the model of STATE/RUN
  sweep STATE RUN MINUTES [OPTION]   FID of the model of STATE/RUN with many patterns, to STATE/RUN/quality.json
  collect STATE RUN DIR        what travels: the result in parts, the newest sheet, the log
  join STATE RUN PART...       put a collected model back: STATE/RUN/model.safetensors
OPTIONs are those of the nearfield command that runs; the last one wins.
END
    exit 2
}

[ $# -ge 2 ] || usage
command=$1 state=$2
shift 2
source benchmarks/staging.sh

train() { # RUN SIZE MINUTES OPTION...
    local run=$1 size=$2 minutes=$3
    shift 3
    nearfield train demo --data "$state/photographs" --latents "$state/latents" --out "$state/$run" \
        --size "$size" --minutes "$minutes" --resume --json "$state/$run/last.json" "$@"
}

model_of() { # RUN: its model, or what was joined from parts
    local file="$state/$1/model.safetensors"
    [ -f "$file" ] || { echo "no model in $state/$1: train or join it first" >&2; exit 1; }
    echo "$file"
}

case $command in
wheels)
    "${BIN:-.venv/bin}/python" -m pip download --quiet --disable-pip-version-check --dest "$state" \
        --python-version "${1:-3.12}" --only-binary=:all: --no-deps -c constraints.txt diffusers peft pillow
    ;;
stage)
    stage "$@"
    ;;
base)
    [ $# -ge 1 ] || usage
    start=()
    # A checkpoint has priority; without one (a new machine), a model that was joined from parts.
    [ -f "$state/base/checkpoint.safetensors" ] || [ ! -f "$state/base/model.safetensors" ] ||
        { mv "$state/base/model.safetensors" "$state/base/start.safetensors"; }
    [ ! -f "$state/base/start.safetensors" ] || start=(--start "$state/base/start.safetensors")
    train base 256 "$1" --batch 256 --compile --attention flash "${start[@]}" "${@:2}"
    ;;
tune)
    [ $# -ge 1 ] || usage
    train tune 512 "$1" --batch 64 --learning-rate 2e-4 --shift 2 --compile --attention flash \
        --start "$(model_of base)" "${@:2}"
    ;;
sparse)
    [ $# -ge 1 ] || usage
    train sparse 512 "$1" --batch 64 --learning-rate 2e-4 --shift 2 --accumulate 2 --method hilbert \
        --start "$(model_of base)" "${@:2}"
    ;;
native)
    [ $# -ge 1 ] || usage
    train native 256 "$1" --batch 256 --compile --method hilbert "${@:2}"
    ;;
native-tune)
    [ $# -ge 1 ] || usage
    train native-tune 512 "$1" --batch 64 --learning-rate 2e-4 --shift 2 --compile --method hilbert \
        --start "$(model_of native)" "${@:2}"
    ;;
distill)
    [ $# -ge 1 ] || usage
    nearfield distill --data "$state/photographs" --latents "$state/latents" --out "$state/distill" \
        --weights "$(model_of tune)" --batch 32 --minutes "$1" --resume --json "$state/distill/last.json" "${@:2}"
    ;;
sample)
    [ $# -ge 2 ] || usage
    nearfield generate --weights "$(model_of "$1")" --images "$2" --out "$2/sheet.png" --json "$2/sheet.json" \
        --batch 64 "${@:3}"
    ;;
sweep)
    [ $# -ge 2 ] || usage
    nearfield bench quality --photographs "$state/photographs" --weights "$(model_of "$1")" \
        --inception "$state/files/inception_fid_fp16.safetensors" --out "$state/$1/quality.json" --minutes "$2" "${@:3}"
    ;;
collect)
    [ $# -eq 2 ] || usage
    mkdir -p "$2"
    for result in model pytorch_lora_weights; do
        [ ! -f "$state/$1/$result.safetensors" ] ||
            split --bytes=15M "$state/$1/$result.safetensors" "$2/$1-$result.part-"
    done
    sheet=$(find "$state/$1" -name 'samples-*.png' | sort | tail -1)
    [ -z "$sheet" ] || cp "$sheet" "$2/$1-$(basename "$sheet")"
    gzip -c "$state/$1/log.jsonl" > "$2/$1-log.jsonl.gz"
    [ ! -f "$state/$1/last.json" ] || cp "$state/$1/last.json" "$2/$1-last.json"
    [ ! -f "$state/$1/quality.json" ] || cp "$state/$1/quality.json" "$2/$1-quality.json"
    ls -l "$2"
    ;;
join)
    [ $# -ge 2 ] || usage
    mkdir -p "$state/$1"
    cat "${@:2}" > "$state/$1/model.safetensors"
    ls -l "$state/$1/model.safetensors"
    ;;
*) usage ;;
esac
