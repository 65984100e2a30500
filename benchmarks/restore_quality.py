"""Rows of the quality campaign that were published, put into a STATE: what the repository holds is not measured again.

    benchmarks/measure_quality.sh restore STATE benchmarks/results/quality-campaign-cats512.json

Each row keeps its commit and date. What STATE knows stays as it is, and a second call changes nothing. Rows of another
size, of other steps, or of a pattern that is another one by now are left out. So is the choice, which follows from the
rows if it is among the same patterns. What is known of tunings is kept to be published again; they cannot go on, for
what they learned is not in such a file.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from plan_quality import CANDIDATES, Plan, Settings, digest_of
from planned import Record, read_json

from nearfield._files import write_json
from nearfield.bench.picture_runs import Task, is_known
from nearfield.bench.quality_cases import (
    GROUPS,
    Pattern,
    as_file_name,
    pattern_named,
    untuned_name,
    without_dense_steps,
)
from nearfield.bench.quality_results import PUBLISHED_TUNINGS
from nearfield.demo.model import EMBEDDED
from nearfield.quality.results import QualityRow, as_document, read_rows


class Published(NamedTuple):
    """What `publish` wrote.

    Args:
        settings, records: of the plan.
        weights: tells models apart.
        tunings: what is known of them.
        facts: of the file: the machine, and what it is about.
    """

    settings: Settings
    records: dict[str, Record]
    weights: str
    rows: list[QualityRow]
    tunings: dict[str, Any]
    facts: Mapping[str, Any]


def read_published(path: Path) -> Published:
    """Says what is wrong and ends the program where it is no such file."""
    try:
        rows, document = read_rows(path), read_json(path) or {}
        known = document["settings"]
        own = {each.name: known[each.name] for each in fields(Settings) if each.name in known}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in own.items()
        }
        records = {name: Record(**record) for name, record in document["parts"].items()}
        # Older files do not name their model; all of them are of the embedded one.
        weights = known.get("weights") or digest_of(EMBEDDED)
        tunings = dict(document["tunings"])
        facts = {name: document[name] for name in ("machine", "about")}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        sys.exit(f"`FILE` must be results that `measure_quality.sh publish` wrote; got {path} ({reason}).")
    return Published(Settings(**values), records, weights, rows, tunings, facts)


def restore(state: Path, file: Path) -> str:
    """Put a file's rows into STATE; returns what was done."""
    published = read_published(file)
    plan = Plan(state, published.settings, 0.0)
    check_same_plan(plan, published, file)
    if not (state / "plan.json").exists():
        # Before any row: it is what keeps them from being taken for those of other settings.
        plan.records = published.records
        plan.write()
    own = [row for row in published.rows if is_own(plan, row)]
    new = [row for row in own if row.samples not in plan.measured(row.pattern)]
    for name in dict.fromkeys(row.pattern for row in new):
        rows = [row for row in new if row.pattern == name]
        add_rows(plan.report(as_file_name(name)), rows, published.facts)
    lost = state / PUBLISHED_TUNINGS
    write_json(lost, published.tunings | (read_json(lost) or {}))
    there, others = len(own) - len(new), len(published.rows) - len(own)
    return f"{len(new)} rows restored; {there} were there, {others} are of other settings."


def check_same_plan(plan: Plan, published: Published, file: Path) -> None:
    """Ends the program where rows of the file and of STATE would not compare."""
    plan.check_fixed()
    weights = plan.facts()["weights"]
    if published.weights != weights:
        sys.exit(
            f"`FILE` must be of the model {weights}, which is {plan.model()}; got {file}, of {published.weights}."
        )


def add_rows(path: Path, rows: Sequence[QualityRow], facts: Mapping[str, Any]) -> None:
    """To a file of STATE; one that is new gets the facts."""
    known = read_json(path)
    there, facts = (read_rows(path), known) if known else ([], facts)
    write_json(path, as_document([*there, *rows], facts["machine"], facts["about"]))


# -- whose rows they are -----------------------------------------------------------------------------------------------


def is_own(plan: Plan, row: QualityRow) -> bool:
    """Whether a row is of the plan's model and sizes, and `bench quality` would know it by its name's pattern. A name
    that is no pattern's any more is not asked for: such a row is kept to be shown."""
    settings = plan.settings
    task = Task(plan.model(), row.samples, settings.steps, settings.size)
    pattern = pattern_of(row)
    if pattern is not None:
        return is_known(task.settings(pattern), [row])
    files = {"weights": own_weights(row) or plan.model().name}
    return (task.settings(None) | files | {"name": row.pattern}).items() <= row.settings.items()


def pattern_of(row: QualityRow) -> Pattern | None:
    """The pattern that is called as a row's now, with the row's own files; None for dense, and where there is none."""
    listed = [pattern for patterns in GROUPS.values() for pattern in patterns]
    listed += [without_dense_steps(pattern_named(name)) for name in CANDIDATES]  # they are tuned
    name = untuned_name(row.pattern)
    found = next((pattern for pattern in listed if pattern.name == name), None)
    if found is None:
        return None
    return replace(found, name=row.pattern, lora=row.settings.get("lora"), weights=own_weights(row))


def own_weights(row: QualityRow) -> str | None:
    """The file of a model that was tuned for a row; None where it is that of all."""
    return row.settings.get("weights") if row.settings.get("tuning") == "own weights" else None


def main(words: Sequence[str]) -> int:
    if len(words) != 2:
        sys.exit(__doc__)
    print(restore(*map(Path, words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
