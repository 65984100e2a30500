"""What one may want to do next: a command for each command, said when it is done."""

from collections.abc import Sequence

_NEXT = {
    "doctor": ("nearfield explain flux-2048", "what a plan costs, and what would run it"),
    "explain": ("nearfield bench attend --quick", "how fast that is on this machine"),
    "demo": ("nearfield generate --compare", "pictures, dense and sparse"),
    "show": ("nearfield generate --compare --tiles 4", "what such tiles do to pictures"),
    "generate": ("nearfield tune --max-lpips 0.1", "the boldest fields that keep pictures so close"),
    "tune": ("nearfield generate --recipe recipe.json --compare", "pictures by the recipe"),
    "rag": ("nearfield rag --docs FOLDER --ask '...' --compare", "every way to choose what is recomputed"),
    "sample": ("nearfield quality SAMPLES PHOTOGRAPHS", "FID and other distances"),
    "train demo": ("nearfield generate --weights OUT/model.safetensors --compare", "pictures by that model"),
    "train pixel": (
        "nearfield sample --weights OUT/model.safetensors --out samples",
        "pictures by that model",
    ),
    "distill": ("nearfield generate --lora OUT/pytorch_lora_weights.safetensors --compare", "what it taught"),
    "quality": ("nearfield bench quality --photographs FOLDER", "the same for many patterns of attention"),
    "bench attend": ("nearfield bench hilbert", "the calls of the Hilbert method"),
    "bench hilbert": ("nearfield bench model --sizes 2048", "one denoising step of a whole model"),
    "bench model": ("nearfield bench quality --photographs FOLDER", "what the speed costs in quality"),
    "bench quality": (
        "nearfield bench pareto --results FILE --plot front.png",
        "speed and quality in one figure",
    ),
    "bench pareto": (
        "nearfield tune --max-lpips 0.1",
        "the boldest fields that keep pictures so close",
    ),
    "bench errors": (
        "nearfield bench quality --photographs FOLDER --patterns FILE",
        "what the best of them do to pictures",
    ),
    "bench loglinear": ("nearfield bench pixel", "what training with it gains"),
    "bench pixel": ("nearfield train pixel --data FOLDER --out RUN --attention loglinear", "train with it"),
    "bench fine": ("nearfield bench recall --latents FILE", "how much of attention fine lists keep"),
    "bench recall": ("nearfield bench fine", "what fine lists cost"),
    "bench retrieval": ("nearfield rag --docs FOLDER --ask '...'", "an answer from texts of yours"),
    "bench scaling": (
        "torchrun --nproc-per-node 2 -m -- nearfield generate",
        "a picture on several processes",
    ),
}
"""The command as it is typed, without arguments; what to type next, and what that shows."""

ENDLESS = {"studio"}
"""Commands that end when one has enough of them."""


def after(words: Sequence[str]) -> str | None:
    """What to try after the command that these words called."""
    for length in (2, 1):
        found = _NEXT.get(" ".join(words[:length]))
        if found is not None:
            command, shows = found
            return f"next: {command}   ({shows})"
    return None
