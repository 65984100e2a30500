#!/usr/bin/env bash
# Measures the embedded model's quality in slices, on a GPU machine without network that may be lost between them.
#
# Photographs, latents, pictures and checkpoints stay in a folder of that machine, STATE. What must travel (rows, strips
# of pictures, LoRAs, logs) is one archive of some MiB, collected after every slice; put back into the STATE of a new
# machine, what was measured is not measured again.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat >&2 <<'END'
usage: benchmarks/measure_quality.sh COMMAND ...
  stage STATE FILE...                 keep files: photographs (.tar), wheels (.whl, unpacked), inception_fid_fp16.safetensors,
                                      and cats.safetensors, a model in the place of the embedded one
  join STATE NAME PART...             the same for one file that came in parts
  plan STATE MINUTES [NAME=VALUE]...  all of it, most important first; the same call again goes on
  collect STATE DIR [TUNING]...       what travels: quality-results.tar.gz, and what TUNINGs (rank-64-equal ...) learned, in parts
  restore STATE FILE                  put what was collected (.tar.gz) into a new STATE, or rows that were published (.json)
                                      into any
  publish RESULTS                     collected results to tables and pictures of docs/quality.md
NAMEs and VALUEs are the settings in benchmarks/plan_quality.py.
END
    exit 2
}

[ $# -ge 2 ] || usage
command=$1 state=$2
shift 2
source benchmarks/staging.sh

case $command in
stage)
    stage "$@"
    ;;
join)
    [ $# -ge 2 ] || usage
    mkdir -p "$state/joined"
    cat "${@:2}" > "$state/joined/$1"
    stage "$state/joined/$1"
    rm -r "$state/joined"
    ;;
plan)
    [ $# -ge 1 ] || usage
    # Asked in the usual way whether there is a GPU, a process could not fork any more.
    PYTORCH_NVML_BASED_CUDA_CHECK=1 "$python" benchmarks/plan_quality.py "$state" "$@"
    ;;
collect)
    [ $# -ge 1 ] || usage
    out=$1
    shift
    mkdir -p "$out"
    for tuning in "$@"; do
        for file in "$state/tuned/$tuning"-of-*/{model,pytorch_lora_weights}.safetensors; do
            name=$(basename "$(dirname "$file")")-$(basename "$file" .safetensors)
            [ ! -f "$file" ] || split --bytes=15M "$file" "$out/$name.part-"
        done
    done
    # Large strips and LoRAs of a high rank would make it too large to travel. With its checkpoint, a small one goes on.
    "$python" benchmarks/shrink.py "$state/strips"
    (cd "$state" && find . \( -name plan.json -o -name chosen.json -o -name published-tunings.json \
        -o -path './quality/*.json' -o -path './printed/*' -o -path './tuned/*/log.jsonl' \
        -o -path './tuned/*/last.json' -o -path './strips/*.jpg' \
        -o \( -path './tuned/*/pytorch_lora_weights*.safetensors' -size -3M \) \
        -o \( -path './tuned/*/checkpoint.safetensors' -size -9M \) \) -print |
        LC_ALL=C sort | tar -czf results.part -T -)
    mv "$state/results.part" "$out/quality-results.tar.gz"
    ls -l "$out"
    ;;
restore)
    [ $# -eq 1 ] || usage
    mkdir -p "$state"
    case $1 in
    *.json) "$python" benchmarks/restore_quality.py "$state" "$1" ;;
    *) tar -xzf "$1" -C "$state" ;;
    esac
    ;;
publish)
    [ $# -eq 0 ] || usage
    nearfield bench quality --results "$state" --out benchmarks/results/quality-campaign-cats512.json \
        --plot docs/images/quality-front.png --sheet docs/images/quality-samples.jpg --page docs/quality.md
    ;;
*) usage ;;
esac
