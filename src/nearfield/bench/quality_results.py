"""What the quality campaign came to: tables, what was to be reached, pictures.

Read from what `benchmarks/measure_quality.sh collect` brings, or from the folder it was collected from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nearfield.bench.collected import (
    filled,
    machine_words,
    markdown_table,
    opened_folder,
    read_document,
    read_plan,
)
from nearfield.bench.picture_runs import DENSE
from nearfield.bench.quality_cases import BASE, GROUPS, SECTIONS, as_file_name, untuned_name
from nearfield.bench.report import table
from nearfield.demo.pictures import Row, read_picture
from nearfield.methods import Hilbert
from nearfield.quality.results import QualityRow, as_document, pareto_front, read_rows

WHAT = "quality"
"""The name of its marks on a page."""

_TUNING, _LOOKED_AT = "Before and after tuning", "Patterns that could be tuned"
_LEFT_OUT = {
    "What is around blocks, over tiles": ("far 16, weighted", "around"),
    "Weighted summaries around blocks": ("around, means", "around"),
    "Sliding": ("far 16, cycle 1", BASE),
    "A shared centre, two-way": (BASE, "far 16, centre, two-way"),
    "A shared centre, keys only": (BASE, "far 16, centre, keys"),
    "The closed curve, over an open one": ("far 16, hilbert", BASE),
    "The Hilbert curve, over raster order": ("far 16, raster", BASE),
}
"""Patterns without and with what is said to help."""

_SHOWN = (
    "around, first 3 steps dense",
    "far 16, 4 tiles",
    BASE,
    "far 16, raster",
    "16 tiles",
    "disc of radius 18",
    "band of 832",
)
PUBLISHED_TUNINGS = "published-tunings.json"
"""What is known of tunings whose folders were lost with their machine."""
_OF_ONE_CALL = ("tuned", "ranks", "sections", "lanes")
"""Settings that say what the last call was to add; results are of all calls."""
_MOST_PAIRS, _MOST_DENSE_STEPS = 0.25, 0.2
_UNTUNED, _TUNED, _SEAM = 1.25, 1.05, 1.02
"""What is to be reached: FID over dense without and with tuning, and seam energy over dense."""


class Collected(NamedTuple):
    """All that was collected: settings and parts are the plan's.

    Args:
        chosen: the pattern that was best untuned; None if that was not decided yet.
        tunings: what the last command of each said; of those of an earlier machine, what was published.
    """

    folder: Path
    settings: dict[str, Any]
    parts: dict[str, Any]
    rows: list[QualityRow]
    machine: dict[str, Any]
    chosen: str | None
    tunings: dict[str, dict[str, Any]]

    def at(self, count: int) -> dict[str, QualityRow]:
        """Rows of so many pictures, by their names."""
        return {row.pattern: row for row in self.rows if row.samples == count}

    @property
    def tuned(self) -> list[str]:
        """Names of patterns with tuned models, the best comparison first."""
        return list(dict.fromkeys(row.pattern for row in self.rows if row.is_tuned))


@contextmanager
def opened(path: Path) -> Iterator[Collected]:
    """The results in a folder or in an archive; pictures can be read as long as it is open."""
    with opened_folder(path) as folder:
        yield read_folder(folder)


def read_folder(folder: Path) -> Collected:
    plan = read_plan(folder, "measure_quality.sh")
    rows: list[QualityRow] = []
    machine: dict[str, Any] = {}
    for path in sorted((folder / "quality").glob("*.json")):
        rows += read_rows(path)
        machine = machine or json.loads(path.read_text(encoding="utf-8"))["machine"]
    rows.sort(key=lambda row: (-row.samples, row.pattern != DENSE, row.is_tuned, row.pattern))
    made = {path.parent.name: read_document(path) for path in (folder / "tuned").glob("*/last.json")}
    tunings = read_document(folder / PUBLISHED_TUNINGS) | made
    chosen = read_document(folder / "chosen.json").get("name")
    return Collected(folder, plan["settings"], plan["parts"], rows, machine, chosen, tunings)


def as_json(collected: Collected) -> dict[str, Any]:
    """A file of quality results with what else is known; paths of that machine stay there."""
    document = as_document(collected.rows, collected.machine, "the embedded model's pictures: the campaign")
    for record in document["results"]:
        record["settings"] = {
            name: Path(value).name if name in ("weights", "lora") and value else value
            for name, value in record["settings"].items()
        }
    tunings = {
        name: {key: last.get(key) for key in ("step", "loss", "training_seconds", "batch")}
        for name, last in sorted(collected.tunings.items())
    }
    settings = {name: value for name, value in collected.settings.items() if name not in _OF_ONE_CALL}
    own = {"settings": settings, "parts": collected.parts}
    return document | own | {"chosen": collected.chosen, "tunings": tunings}


# -- tables --------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    title: str
    num: int
    rows: list[QualityRow]


def sections(collected: Collected) -> list[Section]:
    """Tables of rows that may be compared, the most important first; none without anything to compare."""
    num, screen = collected.settings["num"], collected.settings["screen"]
    candidates = [pattern.name for pattern in GROUPS["search"]]
    own = _before_and_after(collected)
    has_tuned = any(row.is_tuned for row in collected.at(num).values())
    wanted: list[tuple[str, int, Sequence[str]]] = [
        (_TUNING, collected.settings["most"], own),
        ("Ways of tuning" if has_tuned else _TUNING, num, own),
        (_LOOKED_AT, num, candidates),
        (_LOOKED_AT, screen, [*candidates, *collected.at(screen)]),
        *((title, num, names) for title, names in SECTIONS.items()),
    ]
    found = []
    for title, count, names in wanted:
        at = collected.at(count)
        rows = [at[name] for name in dict.fromkeys((DENSE, *names)) if name in at]
        # What stands beside dense in another table is none to compare by itself.
        known = (
            {DENSE} if title == _TUNING else {DENSE, BASE, collected.chosen, *_repeated(title, candidates)}
        )
        if any(row.pattern not in known for row in rows):
            found.append(Section(title, count, rows))
    return found


def _before_and_after(collected: Collected) -> list[str]:
    """Names of what was tuned, each after its pattern without; the chosen pattern comes first."""
    untuned = [*filter(None, [collected.chosen]), *map(untuned_name, collected.tuned)]
    return [
        name
        for pattern in dict.fromkeys(untuned)
        for name in (pattern, *(tuned for tuned in collected.tuned if untuned_name(tuned) == pattern))
    ]


def _repeated(title: str, candidates: Sequence[str]) -> Sequence[str]:
    """Those that could be tuned have a table of their own."""
    return candidates if title in SECTIONS else ()


_HEADS = ("pairs kept", "FID", "over dense", "KID x 1000", "precision, recall")
_LIKENESS_HEADS = ("LPIPS", "PSNR", "seam energy over dense")


def _lines(section: Section) -> list[list[str]]:
    dense = next((row.fid for row in section.rows if row.pattern == DENSE), None)
    heads = [f"{section.num:,} pictures", *_HEADS, *_LIKENESS_HEADS]
    return [heads, *([row.pattern, *_cells(row, dense)] for row in section.rows)]


def _cells(row: QualityRow, dense: float | None) -> list[str]:
    kid = "-" if row.kid is None else f"{1000 * row.kid:.1f} ± {1000 * (row.kid_error or 0):.1f}"
    return [
        f"{row.pairs_kept:.1%}",
        _number(row.fid, ".1f"),
        "-" if row.fid is None or not dense else f"{row.fid / dense - 1:+.0%}",
        kid,
        "-" if row.precision is None else f"{row.precision:.2f}, {row.recall:.2f}",
        _number(row.lpips, ".3f"),
        _number(row.psnr, ".1f"),
        _number(_seam_ratio(row), ".3f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _seam_ratio(row: QualityRow) -> float | None:
    return None if row.seam is None or not row.dense_seam else row.seam / row.dense_seam


def tables(collected: Collected) -> str:
    """For people in a terminal."""
    parts = [f"{section.title}\n{table(_lines(section))}" for section in sections(collected)]
    return "\n\n".join([*parts, *goals(collected)])


def markdown(
    collected: Collected, pictures: Mapping[str, str] | None = None, source: str | None = None
) -> str:
    """The same for a page, with how it came about.

    Args:
        pictures: what they show, and where they are.
        source: where the document is.
    """
    parts = [_circumstances(collected, source)]
    listed = [filled(f"- {sentence}", "  ") for sentence in goals(collected)]
    parts += ["\n".join(listed)] if listed else []
    parts += [f"![{words}]({place})" for words, place in (pictures or {}).items()]
    for section in sections(collected):
        parts += [f"**{section.title}**", markdown_table(_lines(section))]
    return "\n\n".join(parts)


def _circumstances(collected: Collected, source: str | None) -> str:
    settings = collected.settings
    shown = [row for section in sections(collected) for row in section.rows]
    sentences = [
        machine_words(collected.machine, _commits(shown)),
        f"{settings['size']} px, {settings['steps']} steps, the same noise in every row.",
        "FID, KID, precision and recall: against all photographs; only rows of equally many pictures compare.",
        f"LPIPS, PSNR and seam energy: the first {settings['pairs']:,} pictures beside the dense ones.",
        "Nothing is dense, shared or tuned unless a row or its table says so.",
    ]
    if collected.tunings and collected.tuned:
        words = [_tuning_words(settings, *each) for each in sorted(collected.tunings.items())]
        sentences.append(f"Tuned with batch {settings['tuning_batch']}: {', '.join(words)}.")
    if source is not None:
        sentences.append(f"All figures: [{Path(source).name}]({source}).")
    return filled(" ".join(filter(None, sentences)))


def _commits(rows: Sequence[QualityRow]) -> list[str]:
    """Of all rows, the oldest first."""
    dated = sorted((row.date or "", row.commit) for row in rows if row.commit)
    return list(dict.fromkeys(commit for _, commit in dated))


def _tuning_words(settings: Mapping[str, Any], name: str, last: Mapping[str, Any]) -> str:
    """How many of its steps a tuning has made."""
    is_equal = name.partition("-of-")[0].endswith("-equal")
    made, wanted = last.get("step", 0), settings["equal_steps" if is_equal else "tuning_steps"]
    return f"{name} {made:,} steps" if made >= wanted else f"{name} unfinished, {made:,} of {wanted:,} steps"


# -- what was to be reached ----------------------------------------------------------------------------------------


def goals(collected: Collected) -> list[str]:
    """A sentence for everything that was to be reached, as far as it was measured."""
    untuned = [row for row in collected.rows if row.settings.get("method") == "hilbert" and not row.is_tuned]
    few = [row for row in untuned if _fits(row) and row.samples >= collected.settings["num"]]
    overall = [row for row in few if row.pairs_kept <= _MOST_PAIRS]
    limits = f"at most {_MOST_PAIRS:.0%} of the pairs"
    dense_steps = f"{_MOST_DENSE_STEPS:.0%} of the steps dense"
    found = [
        _goal(collected, few, f"Untuned, {limits} in sparse steps, at most {dense_steps}", _UNTUNED),
        _goal(collected, overall, f"Untuned, {limits} over all steps, dense ones included", _UNTUNED),
        _goal(collected, [row for row in collected.rows if row.is_tuned], "Tuned", _TUNED, _SEAM),
    ]
    rows = collected.at(collected.settings["num"])
    found += [
        _effect(what, rows[without], rows[with_it])
        for what, (without, with_it) in _LEFT_OUT.items()
        if without in rows and with_it in rows
    ]
    for words, is_tuned in (("Untuned", False), ("Tuned", True)):
        front = [
            row.pattern for row in pareto_front(row for row in rows.values() if row.is_tuned == is_tuned)
        ]
        if len(front) > (0 if is_tuned else 2):
            found.append(f"{words}, nothing beats these in both pairs kept and FID: {'; '.join(front)}.")
    return [sentence for sentence in found if sentence]


def _fits(row: QualityRow) -> bool:
    """Whether a row reads few enough pairs in its sparse steps, and few enough steps are dense."""
    steps = int(row.settings["steps"])
    dense = sum(Hilbert(dense_steps=row.settings["fields"]["dense_steps"]).dense_ends(steps))
    if dense >= steps or dense > _MOST_DENSE_STEPS * steps:
        return False
    return (row.pairs_kept * steps - dense) / (steps - dense) <= _MOST_PAIRS


def _goal(
    collected: Collected, rows: Sequence[QualityRow], what: str, limit: float, seam_limit: float | None = None
) -> str:
    """The row that is nearest to dense, of those with the largest number of pictures: shares of few are too kind."""
    dense = {row.samples: row.fid for row in collected.rows if row.pattern == DENSE and row.fid}
    shares = [
        (row.samples, row.fid / dense[row.samples], row)
        for row in rows
        if row.fid is not None and row.samples in dense
    ]
    if not shares:
        return ""
    most = max(samples for samples, *_ in shares)
    _, share, best = min((each for each in shares if each[0] == most), key=lambda each: each[1])
    words = (
        f"{what}: FID {best.fid:.1f}, {_beside(share)} ({best.pattern}; {best.pairs_kept:.1%} of the pairs over all;"
        f" {best.samples:,} pictures). To reach: {_beside(limit)}, **{_reached(share <= limit)}**."
    )
    seam = _seam_ratio(best)
    if seam_limit is not None and seam is not None:
        is_reached = abs(seam - 1) <= seam_limit - 1
        words += f" Seam energy {_beside(seam, '.1%')}."
        words += f" To reach: within {seam_limit - 1:.0%}, **{_reached(is_reached)}**."
    return words


def _beside(share: float, form: str = ".0%") -> str:
    return f"{abs(share - 1):{form}} {'above' if share >= 1 else 'below'} dense"


def _reached(is_reached: bool) -> str:
    return "reached" if is_reached else "not reached"


def _effect(what: str, without: QualityRow, with_it: QualityRow) -> str:
    """Whether something is worth it, in FID and in seams."""
    words = f"{what}: FID {_number(without.fid, '.1f')} without, {_number(with_it.fid, '.1f')} with it"
    seams = _seam_ratio(without), _seam_ratio(with_it)
    if None not in seams:
        words += f"; seam energy over dense {_number(seams[0], '.3f')} and {_number(seams[1], '.3f')}"
    changes = {"FID": _fid_change(without, with_it)}
    if None not in seams:
        changes["seams"] = _seam_change(without, with_it)
    if not any(changes.values()):
        return f"{words}: no difference beyond the error."
    return f"{words}: {'; '.join(_verdict(*each) for each in changes.items())}."


def _fid_change(without: QualityRow, with_it: QualityRow) -> int:
    """-1 for less, 1 for more; 0 unless KID, which knows its error, says the same."""
    by_kid = _change(without.kid, with_it.kid, [without.kid_error, with_it.kid_error])
    return by_kid if by_kid == _change(without.fid, with_it.fid) else 0


def _seam_change(without: QualityRow, with_it: QualityRow) -> int:
    """The same of how far the seams are from dense ones."""
    rows = without, with_it
    ratios = [_seam_ratio(row) for row in rows]
    far = [None if ratio is None else abs(ratio - 1) for ratio in ratios]
    errors = [row.seam_error and row.dense_seam and row.seam_error / row.dense_seam for row in rows]
    return _change(far[0], far[1], errors)


def _change(before: float | None, after: float | None, errors: Sequence[float | None] = ()) -> int:
    """-1, 1, or 0 where the difference is not beyond all errors together, or one is not known."""
    known = [error for error in errors if error is not None]
    if before is None or after is None or len(known) < len(errors) or abs(after - before) <= sum(known):
        return 0
    return 1 if after > before else -1


def _verdict(what: str, change: int) -> str:
    words = {-1: "it improves {}", 1: "it makes {} worse", 0: "no difference in {} beyond the error"}
    return words[change].format(what)


# -- pictures ------------------------------------------------------------------------------------------------------


def front_rows(collected: Collected) -> list[QualityRow]:
    """What is drawn: rows of as many pictures as most patterns have."""
    return [row for row in collected.rows if row.samples == collected.settings["num"]]


class Sheet(NamedTuple):
    """The first pictures of a few patterns, of one noise.

    Args:
        missing: patterns with figures whose pictures were lost with their machine.
    """

    rows: list[Row]
    missing: list[str]


def sheet(collected: Collected) -> Sheet:
    names = [DENSE, *filter(None, [collected.chosen]), *collected.tuned[:1], *_SHOWN]
    found = Sheet([], [])
    for name in dict.fromkeys(names):
        row = next((row for row in collected.rows if row.pattern == name), None)
        if row is None:
            continue
        strip = _strip(collected.folder, name)
        if strip is None:
            found.missing.append(name)
            continue
        words = (
            f"{row.pairs_kept:.1%} of the pairs, FID {_number(row.fid, '.1f')} of {row.samples:,} pictures"
        )
        found.rows.append(Row(name, words, read_picture(strip)[None]))
    return found


def _strip(folder: Path, name: str) -> Path | None:
    files = (folder / "strips" / f"{as_file_name(name)}{suffix}" for suffix in (".jpg", ".png"))
    return next((file for file in files if file.exists()), None)
