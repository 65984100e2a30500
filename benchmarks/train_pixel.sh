#!/usr/bin/env bash
# Trains the model on pixels in slices, on a GPU machine without network that may be lost between them.
#
# Photographs and checkpoints with the optimizer's state stay in a folder of that machine, STATE. What must travel (the
# averaged model, sample sheets, logs, figures) is collected in files of at most 15 MiB. A slice goes on from its
# checkpoint; on a new machine, from the collected model. A run is named by size and attention: 64-full, 128-loglinear.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat >&2 <<'END'
usage: benchmarks/train_pixel.sh COMMAND ...
  stage STATE FILE...                     keep files: photographs (.tar), wheels (.whl, unpacked), anything else
  train STATE RUN MINUTES [OPTION]        train RUN = SIZE-ATTENTION[-LABEL]; from STATE/start.safetensors if it is there
  start STATE RUN                         the model of RUN becomes STATE/start.safetensors, from which new runs start
  plan STATE MINUTES [NAME=VALUE]...      all of the comparison, most important first; the same call again goes on
  bench STATE SIZE BATCH [OPTION]         training speed of every attention, to STATE/bench/SIZE.json
  sample STATE RUN NUM MINUTES [OPTION]   pictures by the model of RUN, to STATE/samples/RUN
  fid STATE RUN [OPTION]                  their distance to the photographs, to STATE/quality/RUN.json
  collect STATE DIR [RUN]...              what travels: one archive of logs, figures and pictures; models of RUNs in parts
  publish RESULTS                         collected results to figures and tables of docs/quality.md
  join STATE RUN PART...                  put a collected model back: STATE/runs/RUN/model.safetensors
OPTIONs are those of the nearfield command that runs; the last one wins. `train` needs a minute more than it is given, to
start, to compile and to write; `plan` does not. NAMEs and VALUEs are the settings in benchmarks/plan_pixel.py.
END
    exit 2
}

[ $# -ge 2 ] || usage
command=$1 state=$2
shift 2
source benchmarks/staging.sh

size_of() { # RUN
    local size=${1%%-*}
    [[ $size =~ ^[0-9]+$ && $1 == *-* ]] || { echo "a run is named SIZE-ATTENTION, as 128-loglinear; got $1" >&2; exit 2; }
    echo "$size"
}

attention_of() { # RUN
    local rest=${1#*-}
    echo "${rest%%-*}"
}

model_of() { # RUN
    local file="$state/runs/$1/model.safetensors"
    [ -f "$file" ] || { echo "no model in $state/runs/$1: train or join it first" >&2; exit 1; }
    echo "$file"
}

case $command in
stage)
    stage "$@"
    ;;
train)
    [ $# -ge 2 ] || usage
    run=$1 size=$(size_of "$1") attention=$(attention_of "$1") folder="$state/runs/$1"
    mkdir -p "$folder"
    # A checkpoint has priority; without one (a new machine), a model that was joined from parts; then a common start.
    init=()
    if [ ! -f "$folder/checkpoint.safetensors" ] && [ -f "$folder/model.safetensors" ]; then
        mv "$folder/model.safetensors" "$folder/start.safetensors"
    fi
    for file in "$folder/start.safetensors" "$state/start.safetensors"; do
        if [ ${#init[@]} -eq 0 ] && [ -f "$file" ]; then init=(--init "$file"); fi
    done
    batch=$((size <= 64 ? 64 : size <= 128 ? 16 : 4))
    kernel=(); [ "$attention" != full ] || kernel=(--dense-kernel cudnn)
    nearfield train pixel --data "$state/photographs" --pixels "$state/pixels" --out "$folder" --size "$size" \
        --attention "$attention" --batch "$batch" --compile "${kernel[@]}" --minutes "$2" --resume \
        --json "$folder/last.json" "${init[@]}" "${@:3}"
    ;;
start)
    [ $# -eq 1 ] || usage
    cp "$(model_of "$1")" "$state/start.safetensors"
    ;;
plan)
    [ $# -ge 1 ] || usage
    # Asked in the usual way whether there is a GPU, a process could not fork any more.
    PYTORCH_NVML_BASED_CUDA_CHECK=1 "$python" benchmarks/plan_pixel.py "$state" "$@"
    ;;
publish)
    [ $# -eq 0 ] || usage
    nearfield bench pixel --results "$state" --json benchmarks/results/pixel-training-cats.json \
        --plot docs/images/pixel-loss.png --sheet docs/images/pixel-samples.png --page docs/quality.md
    ;;
bench)
    [ $# -ge 2 ] || usage
    mkdir -p "$state/bench"
    nearfield bench pixel --size "$1" --batch "$2" --compile --json "$state/bench/$1.json" "${@:3}"
    ;;
sample)
    [ $# -ge 3 ] || usage
    nearfield sample --weights "$(model_of "$1")" --out "$state/samples/$1" --num "$2" --minutes "$3" --batch 64 "${@:4}"
    ;;
fid)
    [ $# -ge 1 ] || usage
    mkdir -p "$state/quality"
    inception=(); file="$state/files/inception_fid_fp16.safetensors"
    [ ! -f "$file" ] || inception=(--inception "$file")
    nearfield quality "$state/samples/$1" "$state/photographs" --size "$(size_of "$1")" "${inception[@]}" \
        --json "$state/quality/$1.json" "${@:2}"
    ;;
collect)
    [ $# -ge 1 ] || usage
    out=$1
    shift
    mkdir -p "$out"
    for run in "$@"; do
        split --bytes=15M "$(model_of "$run")" "$out/$run-model.part-"
    done
    # The first pictures of a model show it; the others have done their work in its FID.
    (cd "$state" && find . \( -name plan.json -o -path './bench/*.json' -o -path './quality/*.json' -o -path './printed/*' \
        -o -path './runs/*/log.jsonl' -o -path './runs/*/last.json' -o -path './runs/*/samples-*.png' \
        -o -path './samples/*/00000[0-7].png' \) -print | LC_ALL=C sort | tar -czf results.part -T -)
    mv "$state/results.part" "$out/pixel-results.tar.gz"
    ls -l "$out"
    ;;
join)
    [ $# -ge 2 ] || usage
    mkdir -p "$state/runs/$1"
    cat "${@:2}" > "$state/runs/$1/model.safetensors"
    ls -l "$state/runs/$1/model.safetensors"
    ;;
*) usage ;;
esac
