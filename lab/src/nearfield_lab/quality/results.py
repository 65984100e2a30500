"""What patterns of attention cost and what they do to images: rows of a table, kept as JSON."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

from nearfield._checks import check_int, wrong_value
from nearfield._files import check_fields, read_json
from nearfield.layout import Geometry
from nearfield.methods import PlanMethod

FORMAT = 1


@dataclass(frozen=True)
class QualityRow:
    """One pattern, measured. None stands for what was not measured.

    Args:
        pattern: its name, for people.
        pairs_kept: share of the dense pairs that are read, over all layers and steps; 1 for dense.
        samples: number of images; FID is comparable between equal numbers only.
        fid: Fréchet distance to the references.
        kid, kid_error: kernel distance to the references and its standard error.
        precision, recall: against the references.
        lpips, psnr, ssim: against the dense images of the same seeds.
        seam, seam_error: seam energy on the pattern's lines, and its standard error.
        dense_seam: that of the dense images on the same lines.
        inception_distance, efficientnet_distance: to the dense images of the same seeds, 1 minus the cosine of the
            features of a network.
        tokens_kept: share of the image tokens that is left in blocks that merge.
        milliseconds, dense_milliseconds: of a denoising step, and of the dense model's step in the same run.
        compiled: whether torch.compile made the model faster; pictures are then the same up to rounding.
        commit, date: of the code it was measured with, and when it was; outside of the settings, so that a later run
            knows what was done.
        settings: fields of the method, steps, size, whether the model was tuned: what it takes to do it again.
    """

    pattern: str
    pairs_kept: float
    samples: int
    fid: float | None = None
    kid: float | None = None
    kid_error: float | None = None
    precision: float | None = None
    recall: float | None = None
    lpips: float | None = None
    psnr: float | None = None
    ssim: float | None = None
    seam: float | None = None
    seam_error: float | None = None
    dense_seam: float | None = None
    inception_distance: float | None = None
    efficientnet_distance: float | None = None
    tokens_kept: float | None = None
    milliseconds: float | None = None
    dense_milliseconds: float | None = None
    compiled: bool | None = None
    commit: str | None = None
    date: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "QualityRow":
        """From a record; keys that are not known are passed over."""
        return cls(**{each.name: record[each.name] for each in fields(cls) if each.name in record})

    @property
    def is_tuned(self) -> bool:
        """Whether something was done to the model for the pattern."""
        return str(self.settings.get("tuning", "none")) != "none"

    def __post_init__(self) -> None:
        if not 0 < self.pairs_kept <= 1:
            wrong_value("pairs_kept", "be above 0 and at most 1", self.pairs_kept)
        check_int("samples", self.samples, at_least=1)
        for name, value in asdict(self).items():
            # PSNR is infinite for equal images, an error of one value unknown; JSON knows neither.
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, None)

    @property
    def speed_up(self) -> float | None:
        """How many times as fast a denoising step is as the dense model's of the same run."""
        if self.milliseconds is None or self.dense_milliseconds is None:
            return None
        return self.dense_milliseconds / self.milliseconds


def pairs_kept(
    method: PlanMethod,
    geometry: Geometry,
    *,
    layers: int,
    steps: int,
    heads: int = 1,
    q_block: int | None = None,
) -> float:
    """The share of dense attention's pairs that a method reads over all layers and steps, dense ones included.

    Args:
        layers: attention layers of the model.
        steps: denoising steps.
        heads: number of heads; matters where they differ.
        q_block: the block the model ran with, to which tiles are rounded: 16 on the CPU, 128 on a GPU.
    """
    check_int("layers", layers, at_least=1)
    check_int("steps", steps, at_least=1)
    shares = []
    for layer in range(layers):
        if method.dense_layer_reason(layer, layers) is not None:
            shares.append(1.0)
            continue
        attention = method.layer(geometry, layer, heads=heads, q_block=q_block)
        shares.append(attention.num_pairs / geometry.num_tokens**2)
    dense_steps = sum(method.num_dense_steps(steps))
    sparse = sum(shares) / layers
    return (dense_steps + (steps - dense_steps) * sparse) / steps


def pareto_front(rows: Iterable[QualityRow]) -> list[QualityRow]:
    """The rows that no other row beats in both pairs kept and FID, from few pairs to many."""
    return unbeaten((row.pairs_kept, row.fid, row) for row in rows if row.fid is not None)


def unbeaten(measured: Iterable[tuple[float, float, Any]]) -> list[Any]:
    """The things that no other beats in both cost and distance, where less is better; in the order of cost."""
    front, best = [], math.inf
    for _, distance, each in sorted(measured, key=lambda found: found[:2]):
        if distance < best:
            front.append(each)
            best = distance
    return front


def as_document(rows: Sequence[QualityRow], machine: Mapping[str, Any], about: str = "") -> dict[str, Any]:
    """Rows with the machine's facts, in plain values."""
    return {
        "format": FORMAT,
        "benchmark": "quality",
        "about": about,
        "machine": dict(machine),
        "results": [asdict(row) for row in rows],
    }


def read_rows(path: Path) -> list[QualityRow]:
    """Rows of a file that `as_document` describes, or of `python -m benchmarks pictures`.

    Older rows do not say of which commit and date they are: they get the file's.
    """
    document = read_json(path, {})
    kind = document.get("benchmark"), document.get("format")
    if kind not in (("quality", FORMAT), ("pictures", 2)):
        raise ValueError(f"{path} does not hold quality results of format {FORMAT}.")
    check_fields(path, document, {"results": list, "machine": (dict, NoneType)})
    rows = []
    for record in document["results"]:
        check_fields(path, record, {"pattern": str, "pairs_kept": float, "samples": int})
        if record.get("status", "ok") == "ok":
            rows.append(QualityRow.of(record))
    machine: dict[str, Any] = document.get("machine") or {}
    made: dict[str, Any] = {"commit": machine.get("commit"), "date": machine.get("date")}
    return [row if row.date else replace(row, **made) for row in rows]


def table(rows: Sequence[QualityRow]) -> str:
    """The rows as Markdown, with a column for what any of them has."""
    columns = [name for name in _DECIMALS if any(getattr(row, name) is not None for row in rows)]
    lines = [f"| pattern | {' | '.join(name.replace('_', ' ') for name in columns)} |"]
    lines.append(f"|---|{'---:|' * len(columns)}")
    lines += [f"| {row.pattern} | {' | '.join(_cell(row, name) for name in columns)} |" for row in rows]
    return "\n".join(lines)


_DECIMALS = {
    "pairs_kept": 3,
    "samples": 0,
    "fid": 1,
    "kid": 4,
    "precision": 3,
    "recall": 3,
    "lpips": 3,
    "psnr": 1,
    "ssim": 3,
    "seam": 3,
    "dense_seam": 3,
    "inception_distance": 4,
    "efficientnet_distance": 4,
    "tokens_kept": 3,
    "milliseconds": 2,
    "dense_milliseconds": 2,
    "speed_up": 2,
}


def _cell(row: QualityRow, name: str) -> str:
    value = getattr(row, name)
    return "-" if value is None else f"{value:,.{_DECIMALS[name]}f}"
