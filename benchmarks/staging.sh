# What the scripts for GPU machines without network share; they source it with STATE in `state`.

python=${PYTHON:-python3}
export PYTHONPATH="src:$state/tools${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Compiled graphs outlive a slice.
export TORCHINDUCTOR_CACHE_DIR="$state/compiled/inductor" TRITON_CACHE_DIR="$state/compiled/triton"

nearfield() { "$python" -m nearfield "$@"; }

stage() { # FILE...: photographs (.tar), wheels (.whl, unpacked), anything else
    local file
    mkdir -p "$state/photographs" "$state/tools" "$state/files"
    for file in "$@"; do
        case $file in
        *.tar) cp "$file" "$state/photographs/" ;;
        *.whl) "$python" -m zipfile -e "$file" "$state/tools" ;;
        *) cp "$file" "$state/files/" ;;
        esac
    done
    du -sh "$state"/*
}
