"""The tables of measurements on the pages, made from the files in benchmarks/results: `python docs/result_tables.py`.

Between `<!-- NAME -->` and `<!-- end -->` a page holds the table of that name, as the function of that name makes it. A
test holds that pages and files agree, so a figure cannot be older than its file.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT / "src"), str(ROOT / "lab" / "src")) if path not in sys.path]

from nearfield import Hilbert  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs", ROOT / "benchmarks" / "notes")
_BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
MISSING = "not measured"


@cache
def document(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(*names: str) -> list[dict[str, Any]]:
    """The results of files, one after another."""
    return [row for name in names for row in document(name)["results"]]


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown. Columns whose title begins with `:` are aligned to the left."""
    titles = [title.strip() for title in header.split("|")]
    rules = "|".join("---" if title.startswith(":") else "---:" for title in titles)
    lines = [f"| {' | '.join(title.removeprefix(':') for title in titles)} |", f"|{rules}|"]
    escaped = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in escaped])


def _times(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# -- models ------------------------------------------------------------------------------------------------------------

SIZES = ("1024", "2048", "4096")


def _steps() -> dict[str, dict[str, Any]]:
    """A step of FLUX.1's architecture with the default method in every step, by size; the later file counts."""
    return {row["pixels"]: row for row in rows_of("model-h200-5", "model-h200-6")}


def whole_run(step: float, steps: int) -> float:
    """How many times as fast all steps are together, some of which are dense by default."""
    dense, last = Hilbert().num_dense_steps(steps)
    return steps / (dense + last + (steps - dense - last) / step)


def _fid(pattern: str, samples: int) -> str:
    found = [row for row in rows_of("quality-campaign-cats512") if row["pattern"] == pattern]
    return f"{next(row['fid'] for row in found if row['samples'] == samples):.1f}"


def pictures() -> str:
    """Speed and quality of the same setting: FLUX.1's architecture, and the embedded model's pictures."""
    steps = [_steps()[size]["speed_up"] for size in SIZES]
    ceiling = [_times(_steps()[size]["ceiling"]) for size in SIZES]
    calls = {row["case"]: row["speed_up"] for row in rows_of("hilbert-h200-7")}
    merged = rows_of("model-merge-h200-2")[0]["speed_up"]
    sparse = [_times(step) for step in steps]
    fids = {row["pattern"]: row["fid"] for row in rows_of("quality-merge512-h200")}
    return table(
        ":call|:what is timed|1024 px|2048 px|4096 px|FID|FID of dense|pictures",
        [
            [
                "`apply(pipe)`: the first 15 % of the steps dense",
                "16 steps, computed",
                *(_times(whole_run(step, 16)) for step in steps),
                _fid("around, first 3 steps dense", 1500),
                _fid("dense", 1500),
                "1,500",
            ],
            [
                "`apply(pipe, Hilbert(dense_steps=0))`",
                "one step",
                *sparse,
                _fid("around", 5000),
                _fid("dense", 5000),
                "5,000",
            ],
            [
                "the same with a LoRA that was distilled for it",
                "one step, timed without it",
                *sparse,
                _fid("around, tuned: LoRA of rank 4, 400 steps", 5000),
                _fid("dense", 5000),
                "5,000",
            ],
            [
                "`apply(pipe, Hilbert(dense_steps=0))`, **kernel only**",
                "one attention call",
                *(_times(calls[f"{size}-default"]) for size in SIZES),
                _fid("around", 5000),
                _fid("dense", 5000),
                "5,000",
            ],
            [
                "the stock model without attention (`apply` also speeds up rotation)",
                "one step",
                *ceiling,
                "",
                "",
                "",
            ],
            [
                "`apply(pipe, Merge())`, which ruins pictures",
                "one step",
                _times(merged),
                MISSING,
                MISSING,
                f"{fids['merge 0.5, run']:.0f}",
                f"{fids['dense']:.0f}",
                "500",
            ],
        ],
    )


def whole_runs() -> str:
    """The default in runs of other lengths."""
    speeds = [_steps()[size]["speed_up"] for size in SIZES]
    rows = []
    for count in (16, 28, 50):
        dense = sum(Hilbert().num_dense_steps(count))
        rows.append([f"{count}, {dense}", *(_times(whole_run(speed, count)) for speed in speeds)])
    return table("steps, of them dense|1024 px|2048 px|4096 px", rows)


def hilbert_steps() -> str:
    rows = []
    for size, row in _steps().items():
        times = {name: f"{value['median']:.0f} ms" for name, value in row["milliseconds"].items()}
        rows.append(
            [
                f"{size} px",
                _percent(row["density"]),
                times["cudnn"],
                times["nearfield"],
                _times(row["speed_up"]),
                _times(row["ceiling"]),
            ]
        )
    return table(":size|pairs read|dense step|sparse step|speed-up|without attention", rows)


def hilbert_calls() -> str:
    names = {
        "default": "`Hilbert()`",
        "text": '`Hilbert(text_reads="summary")`',
        "tiles": "tiles and means",
    }
    rows = []
    for row in rows_of("hilbert-h200-7"):
        size, _, kind = row["case"].partition("-")
        dense = row["dense_milliseconds"]["cudnn"]
        rows.append(
            [
                f"{names[kind]}, {size} px",
                _percent(row["density"]),
                f"{dense['median'] if isinstance(dense, dict) else dense:#.3g} ms",
                f"{row['milliseconds']:#.3g} ms",
                _times(row["speed_up"]),
                _times(row["bound"]),
            ]
        )
    return table(":call|pairs read|cuDNN|nearfield|speed-up|at most, by pairs", rows)


def patterns() -> str:
    """1,500 pictures of each pattern."""
    found = [row for row in rows_of("quality-campaign-cats512") if row["samples"] == 1500]
    found.sort(key=lambda row: row["fid"])
    return table(
        ":pattern|pairs read|FID|KID x 1000|precision, recall|LPIPS|PSNR|seams over dense",
        [_pattern_cells(row) for row in found],
    )


def before_and_after() -> str:
    """5,000 pictures of each pattern."""
    found = [row for row in rows_of("quality-campaign-cats512") if row["samples"] == 5000]
    return table(
        ":pattern|pairs read|FID|KID x 1000|precision, recall|LPIPS|PSNR|seams over dense",
        [_pattern_cells(row) for row in sorted(found, key=lambda row: row["pattern"] != "dense")],
    )


def _pattern_cells(row: dict[str, Any]) -> list[str]:
    seams = "-" if row["seam"] is None else f"{row['seam'] / row['dense_seam']:.3f}"
    return [
        row["pattern"],
        _percent(row["pairs_kept"]),
        f"{row['fid']:.1f}",
        f"{1000 * row['kid']:.1f} ± {1000 * row['kid_error']:.1f}",
        f"{row['precision']:.2f}, {row['recall']:.2f}",
        "-" if row["lpips"] is None else f"{row['lpips']:.3f}",
        "-" if row["psnr"] is None else f"{row['psnr']:.1f}",
        seams,
    ]


EMBEDDED = {
    "dense": "dense",
    "FineGrained, 1/N": '`FineGrained(threshold="1/N")`',
    "far 16": "`Hilbert`, 16 tiles, summaries of 16",
    "16 tiles": "`Hilbert`, 16 tiles and a shared centre, the paper's parts",
    "FineGrained online, 90%": '`FineGrained(predict="online", top_p=0.9)`',
    "BlockTopK, 50%": "`BlockTopK(keep=0.5)`",
    "LogLinear, top 8": "`LogLinear()`, on a model that was not trained for it",
    "merge 0.25, run": "`Merge(ratio=0.25)`",
    "merge 0.5, run": "`Merge(ratio=0.5)`",
    "strided keys": "`StridedKeys()`",
}


def methods_on_the_embedded_model() -> str:
    found = {row["pattern"]: row for row in rows_of("pareto-cats512-h200")}
    rows = []
    for pattern, name in EMBEDDED.items():
        row = found[pattern]
        faster = row["dense_milliseconds"] / row["milliseconds"] if pattern != "dense" else 1.0
        likeness = ["-", "-"] if row["lpips"] is None else [f"{row['lpips']:.3f}", f"{row['psnr']:.1f} dB"]
        rows.append([name, _times(faster), _percent(row["pairs_kept"]), *likeness])
    return table(":method|a step, over dense|pairs read|LPIPS to dense|PSNR to dense", rows)


def merged_pictures() -> str:
    """Merging, its baselines, and sparse reading."""
    names = {
        "dense": "dense",
        "merge 0.25, run": "`Merge(0.25)`",
        "merge 0.5, run": "`Merge(0.5)`",
        "merge 0.75, run": "`Merge(0.75)`",
        "merge 0.5, by module": '`Merge(0.5, placement="module")`',
        "merge 0.5, global": '`Merge(0.5, region="global")`',
        "bipartite 0.25": "`BipartiteMerge(0.25)`",
        "bipartite 0.5": "`BipartiteMerge(0.5)`",
        "strided keys": "`StridedKeys()`",
        "merge 0.5, 4 tiles": "`Merge(0.5)`, then 4 tiles",
        "merge 0.5, 16 tiles": "`Merge(0.5)`, then 16 tiles",
        "Hilbert()": "tiles without merging",
    }
    found = {row["pattern"]: row for row in rows_of("quality-merge512-h200")}
    rows = []
    for pattern, name in names.items():
        row = found[pattern]
        rows.append(
            [
                name,
                _percent(row["pairs_kept"]),
                f"{row['fid']:.1f}",
                "-" if row["lpips"] is None else f"{row['lpips']:.3f}",
                "-" if row["psnr"] is None else f"{row['psnr']:.1f}",
            ]
        )
    return table(":setting|pairs read|FID|LPIPS to dense|PSNR to dense", rows)


def merged_steps() -> str:
    rows = []
    for row in rows_of("model-merge-h200-2", "model-merge-hilbert-h200-2"):
        is_both = "hilbert" in row["method_name"]
        times = row["milliseconds"]
        setting = '`Merge() | Hilbert(near="tile", ...)`' if is_both else "`Merge()`"
        rows.append(
            [
                f"{row['pixels']} px, {setting}",
                f"{times['cudnn']['median']:.0f} ms",
                f"{times['nearfield']['median']:.0f} ms",
                _times(row["speed_up"]),
                _percent(row["merging_share"]),
                MISSING if is_both else "155 (dense 31)",
            ]
        )
    return table(":setting|dense step|step|speed-up|merging's share of it|FID on the embedded model", rows)


# -- videos ------------------------------------------------------------------------------------------------------------


def videos() -> str:
    """A step of Wan 2.1's architecture, 70 % of the keys skipped, with the fastest blocks."""
    return _videos("model-wan-h200-2", "query_block=192, grain=8")


def videos_by_default() -> str:
    """The same with the method's default blocks."""
    return _videos("model-wan-h200", "")


def _videos(file: str, blocks: str) -> str:
    rows = []
    for row in (row for row in rows_of(file) if row["skipped"] == 0.7):
        size, _, variant = row["name"].partition("; ")
        online = ', predict="online"' if variant.startswith("online") else ""
        whole = row["speed_up_over_generation"]
        rows.append(
            [
                f"{size}, `FineGrained({(blocks + online).removeprefix(', ')})`",
                f"{row['milliseconds']['cudnn']['median']:.0f} ms",
                f"{row['milliseconds']['nearfield']['median']:.0f} ms",
                _times(row["speed_up"]),
                _times(whole) if whole else "as a step",
                _times(row["ceiling"]),
            ]
        )
    return table(":setting|dense step|step|speed-up|50 steps, computed|no self-attention", rows)


def fine_calls() -> str:
    """One attention call of Wan 2.1's shape; where a case was measured again, the last run."""
    found = {row["case"]: row for row in rows_of("fine-h200", "fine-h200-2", "fine-h200-3")}
    rows = []
    for case, row in found.items():
        size, skipped, blocks = case.removeprefix("wan-").split("-")
        queries, keys = blocks.split("x")
        figures = row["figures"]
        rows.append(
            [
                f"{size}, {queries} queries x {keys} keys",
                f"{skipped} %",
                f"{row['milliseconds']['dense cudnn']['median']:.1f} ms",
                _times(figures["cached"]),
                _times(figures["online"]),
                f"{figures['refresh']:.2f}",
                f"{row['list_bytes'] / 2**20:.0f} MiB",
            ]
        )
    return table(":shape, blocks|skipped|dense|cached|online|a refresh, in dense calls|lists", rows)


# -- log-linear --------------------------------------------------------------------------------------------------------


def log_linear_calls() -> str:
    rows = []
    for row in rows_of("loglinear-h200-6"):
        batch, heads, tokens, _ = row["shape"]
        times = row["milliseconds"]
        rows.append(
            [
                f"{batch} x {heads} x {tokens:,}",
                str(row["keys_per_query"]),
                f"{times['forward, graph']['median']:#.3g} ms",
                _times(row["over_dense"]["forward"]),
                f"{times['forward + backward, graph']['median']:#.3g} ms",
                _times(row["over_dense"]["forward + backward"]),
            ]
        )
    return table(
        ":batch x heads x tokens|keys per query|forward|over cuDNN|forward + backward|over cuDNN", rows
    )


_ATTENTIONS = {
    "full": "full attention (cuDNN)",
    "loglinear": "`LogLinear()`",
    "gated": "`GatedBlocks()` (VSA)",
    "linear": "`SparseLinear()` (SLA)",
}


def pixel_speed() -> str:
    """Training steps of the transformer on pixels."""
    rows = []
    found = [{row["attention"]: row for row in rows_of(name)} for name in PIXEL_SPEED]
    for attention, name in _ATTENTIONS.items():
        cells = [name]
        for row in (file[attention] for file in found):
            cells += [
                f"{row['milliseconds']['median']:.0f} ms",
                _times(row["over_full"] or 1.0),
                f"{row['peak_bytes'] / 2**30:.1f} GiB",
            ]
        rows.append(cells)
    return table(":attention|128 px: a step|over full|memory|256 px: a step|over full|memory", rows)


PIXEL_SPEED = ("pixel-speed-h200", "pixel-speed-256-h200")


def pixel_training() -> str:
    """The first minutes of a training at 64 px: after equally many steps, and after equal time."""
    rows = []
    for row in rows_of("pixel-training-cats"):
        if row["size"] != 64:
            continue
        cells = [row["name"]]
        for point in (row["equal_samples"], row["equal_time"]):
            figures = point and [str(point["step"]), f"{point['loss']:.4f}", f"{point['fid']:.1f}"]
            cells += figures or ["-", "-", "-"]
        rows.append(cells)
    return table(":attention|steps|loss|FID|steps in equal time|loss|FID", rows)


def trained_sparse() -> str:
    """The embedded model's recipe with dense and with sparse attention, 1,500 pictures each."""
    native = {
        row["pattern"]: row["fid"] for row in rows_of("quality-native-cats512") if row["samples"] == 1500
    }
    tuned = "around, tuned: LoRA of rank 4, 400 steps"
    return table(
        ":trained|:pictures made|pairs read|FID",
        [
            ["dense", "dense", "100 %", _fid("dense", 1500)],
            ["dense", "sparse", "21.7 %", _fid("around", 1500)],
            ["dense, then a LoRA for sparse attention", "sparse", "21.7 %", _fid(tuned, 1500)],
            ["sparse from the first step", "sparse", "21.7 %", f"{native['around']:.1f}"],
            ["sparse from the first step", "dense", "100 %", f"{native['dense']:.1f}"],
        ],
    )


# -- retrieval ---------------------------------------------------------------------------------------------------------


def retrieval_speed() -> str:
    found = rows_of("retrieval-speed-h200-2", "retrieval-speed-h200-3")
    names = {"llama-3.1-8b": "Llama-3.1-8B", "qwen3-14b": "Qwen3-14B"}
    rows = []
    for row in sorted(found, key=lambda row: (row["model"], row["length"])):
        times = {name: value["median"] for name, value in row["milliseconds"].items()}
        rows.append(
            [
                f"{names[row['model']]}, {row['length']:,} tokens",
                f"{times['full prefill']:.0f} ms",
                f"{times['reuse']:.0f} ms",
                _times(row["speed_up"]),
                f"{times['assemble']:.1f} ms",
                f"{times['score']:.1f} ms",
                f"{times['recompute']:.0f} ms",
            ]
        )
    return table(":architecture|full prefill|reuse|speed-up|assemble|score|recompute", rows)


_SELECTORS = {
    "none": "none",
    "random": "random",
    "epic": "EPIC",
    "cacheblend": "CacheBlend",
    "infoflow": "InfoFlow",
}


def retrieval_fidelity() -> str:
    """Divergence from full prefill, with bootstrap intervals, and equal top tokens."""
    found = {(row["selector"], row["ratio"]): row for row in rows_of("retrieval-fidelity-cpu")}
    rows = []
    for selector, name in _SELECTORS.items():
        cells = [name]
        for ratio in (0.05, 0.15, 0.3):
            row = found.get((selector, ratio)) or (found.get((selector, 0.0)) if ratio == 0.05 else None)
            cells += (
                [_interval(row["divergence"]), f"{100 * row['agreement']['mean']:.0f} %"] if row else ["", ""]
            )
        rows.append(cells)
    return table(":selector|5 %: KL|same top token|15 %: KL|same top token|30 %: KL|same top token", rows)


def retrieval_differences() -> str:
    """InfoFlow's divergence less that of the others, question by question."""
    found = {(row["against"], row["ratio"]): row for row in document("retrieval-fidelity-cpu")["differences"]}
    rows = [
        [
            _SELECTORS[other],
            *(_interval(found[other, ratio]["divergence"], "+") for ratio in (0.05, 0.15, 0.3)),
        ]
        for other in ("random", "epic", "cacheblend")
    ]
    return table(":against|:5 %|:15 %|:30 %", rows)


def _interval(value: dict[str, float], sign: str = "") -> str:
    mean, low, high = (format(value[name], f"{sign}.3f") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


# -- many ranks --------------------------------------------------------------------------------------------------------

RANKS = (2, 4, 8, 16, 32, 64)


def bytes_between_ranks() -> str:
    """What the busiest rank sends in a layer, forward."""
    found = {(row["case"], row["ranks"]): row for row in rows_of("scaling")}
    names = {
        "flux-2048": "FLUX 2048 px, 16 tiles",
        "flux-4096": "FLUX 4096 px, 64 tiles",
        "flux-4096-far-64": "FLUX 4096 px, 64 tiles, `far=64`",
        "flux-4096-tiles": "FLUX 4096 px, 16 tiles, `far=16`",
        "flux-4096-default": "FLUX 4096 px, `Hilbert()`",
        "flux-8192": "FLUX 8192 px, 256 tiles",
        "wan-720p": "Wan 720p, 81 frames, 64 tiles",
    }
    rows = []
    for case, name in names.items():
        sent = (found[case, ranks] for ranks in RANKS)
        rows.append(
            [name, *(f"{_mib(row['sent'])} ({100 * row['sent'] / row['ring']:.1f} %)" for row in sent)]
        )
        if case in ("flux-2048", "flux-4096", "flux-8192", "wan-720p"):
            for other in ("ring", "ulysses"):
                numbers = (found[case, ranks].get(other) for ranks in RANKS)
                rows.append([_DENSE[other], *(_mib(number) if number else "-" for number in numbers)])
    return table(f":MiB per layer|{'|'.join(f'{ranks} ranks' for ranks in RANKS)}", rows)


_DENSE = {"ring": "- dense, ring attention", "ulysses": "- dense, Ulysses"}


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f}" if number < 99.95 * 2**20 else f"{number / 2**20:,.0f}"


def step_times_over_ranks() -> str:
    """Computed seconds of a step."""
    found = {(row["case"], row["ranks"]): row["step_seconds"] for row in rows_of("scaling")}
    links = {"NVLink, 450 GB/s": "NVLink", "400 Gbit/s network": "network"}
    rows = []
    for size in SIZES[1:]:
        for link, word in links.items():
            for method in ("nearfield", "ring", "ulysses"):
                seconds = (found[f"flux-{size}", ranks][link].get(method) for ranks in RANKS)
                cells = (f"{value:.3f}" if value else "-" for value in seconds)
                rows.append([f"{size} px, {word}: {method}", *cells])
    return table(f":seconds per step|{'|'.join(f'{ranks} ranks' for ranks in RANKS)}", rows)


TABLES: dict[str, Callable[[], str]] = {
    made.__name__.replace("_", " "): made
    for made in (
        pictures,
        whole_runs,
        hilbert_steps,
        hilbert_calls,
        patterns,
        before_and_after,
        methods_on_the_embedded_model,
        merged_pictures,
        merged_steps,
        videos,
        videos_by_default,
        fine_calls,
        log_linear_calls,
        pixel_speed,
        pixel_training,
        trained_sparse,
        retrieval_speed,
        retrieval_fidelity,
        retrieval_differences,
        bytes_between_ranks,
        step_times_over_ranks,
    )
}


def written(page: str) -> str:
    """The page with its tables as the files have them now."""
    return _BLOCK.sub(
        lambda block: f"<!-- {block['name']} -->\n{TABLES[block['name']]()}\n<!-- end -->", page
    )


def pages() -> list[Path]:
    """Pages that hold such tables."""
    found = [path for folder in PAGES for path in sorted(folder.glob("*.md"))]
    return [path for path in found if _BLOCK.search(path.read_text(encoding="utf-8"))]


def write() -> None:
    for path in pages():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
