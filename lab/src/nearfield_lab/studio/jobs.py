"""One picture, dense and sparse from the same noise, with what there is to say about the two. Can be cancelled."""

import math
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield.methods import Method
from nearfield_lab import quality
from nearfield_lab.commands.generating import measures
from nearfield_lab.embedded import generate
from nearfield_lab.embedded.generate import Run
from nearfield_lab.studio.drawing import seam_map
from nearfield_lab.studio.models import PictureModel

MOST_STEPS = 100
_LEAST_PIXELS_PER_TOKEN = 4  # that seam energy is defined for
HEADINGS = ("", "per step", "speed-up", "PSNR to dense", "LPIPS", "seam energy")
OnProgress = Callable[[int, int, str], None]


class Request(NamedTuple):
    """What to make; `with_lora`: by the model's LoRA, where it has one that was made for the method."""

    height: int
    width: int
    steps: int
    seed: int
    method: Method
    prompt: str = ""
    with_lora: bool = True


class Outcome(NamedTuple):
    """Two pictures `[height, width, 3]` uint8, where they differ, and figures in words, a row for each."""

    dense: Tensor
    sparse: Tensor
    seams: Tensor
    rows: list[list[str]]
    summary: str


class Cancelled(Exception):
    """The job was asked to stop, and did after the step it was at."""


class Jobs:
    """Who is making a picture, by session, so that each can cancel its own."""

    def __init__(self) -> None:
        self._stops: dict[str, threading.Event] = {}

    def begin(self, session: str) -> threading.Event:
        """The job of a session, from when it is asked for, waiting included; set the event to stop it."""
        return self._stops.setdefault(session, threading.Event())

    def end(self, session: str) -> None:
        self._stops.pop(session, None)

    def cancel(self, session: str) -> bool:
        """Ask the session's job to stop; False where there is none."""
        stop = self._stops.get(session)
        if stop is not None:
            stop.set()
        return stop is not None


def check_request(model: PictureModel, request: Request) -> None:
    check_int("steps", request.steps, at_least=1)
    if request.steps > MOST_STEPS:
        wrong_value("steps", f"be at most {MOST_STEPS}", request.steps)
    check_int("seed", request.seed, at_least=0)
    model.geometry(request.height, request.width)


def make(
    model: PictureModel,
    request: Request,
    stop: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Both pictures and what they cost. Raises `Cancelled` once `stop` is set."""
    check_request(model, request)
    done, total, doing = 0, 2 * request.steps, "dense"

    def on_step(step: int, steps: int) -> None:
        nonlocal done
        if stop is not None and stop.is_set():
            raise Cancelled(f"Cancelled after {done} of {total} steps.")
        if on_progress is not None:
            on_progress(done, total, doing)
        done += 1

    size = request.height, request.width
    sample = model.sampler(size, request.steps, request.seed, request.prompt, on_step)
    pipeline = model.pipeline()
    dense = generate.run_dense(sample)
    doing = "sparse"
    caution = request.method.warning
    with warnings.catch_warnings(), model.tuned_for(request.method, request.with_lora) as lora:
        if caution:  # said on the page instead
            warnings.filterwarnings("ignore", re.escape(caution))
        sparse = generate.run_sparse(sample, pipeline, request.method, lora=lora)
    notes = [f"note: {words}\n" for words in (caution, "with the embedded LoRA" if lora else "") if words]
    sparse = sparse._replace(summary="".join(notes) + sparse.summary)
    return _outcome(model, request.method, dense, sparse)


def _outcome(model: PictureModel, method: Method, dense: Run, sparse: Run) -> Outcome:
    first, second = generate.compared([dense, sparse], measures(str(model.device), dense.images))
    borders = _borders(model, method, sparse)
    energies = [_energy(run, borders) for run in (dense, sparse)]
    rows = [_row(record, energy) for record, energy in zip((first, second), energies, strict=True)]
    seams = seam_map(dense.images[0], sparse.images[0], borders)
    return Outcome(dense.images[0], sparse.images[0], seams, rows, sparse.summary)


def _borders(model: PictureModel, method: Method, sparse: Run) -> quality.Borders | None:
    """Of tiles, where there are any and the picture's pixels fall into its tokens evenly."""
    if sparse.geometry is None or len(sparse.geometry.grid) != 2:
        return None
    rows, columns = sparse.geometry.grid
    height, width = sparse.images.shape[1:3]
    if height % rows or width % columns or height // rows != width // columns:
        return None
    return method.borders(sparse.geometry, device=model.device)


def _energy(run: Run, borders: quality.Borders | None) -> str:
    if borders is None or float(borders.right.sum() + borders.below.sum()) == 0:
        return "-"
    if run.images.shape[1] // borders.grid[0] < _LEAST_PIXELS_PER_TOKEN:
        return "-"
    gradients = quality.line_gradients(run.images.permute(0, 3, 1, 2), borders)
    across, around = gradients.mean(dim=0).tolist()
    return f"{across / around:.3f}" if around else "-"


def _row(record: dict[str, Any], energy: str) -> list[str]:
    seconds = record["seconds_per_step"]
    time = f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"

    def words(name: str, form: str) -> str:
        value = record.get(name)
        return "-" if value is None or not math.isfinite(value) else form.format(value)

    figures = [words("speed_up", "{:.2f}x"), words("psnr", "{:.1f} dB"), words("lpips", "{:.3f}")]
    return [record["name"], time, *figures, energy]
