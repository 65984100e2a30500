"""The search for the boldest fields of a method that keep a model's pictures close to its dense ones.

First every group of layers is made sparse alone: how far its pictures move says how well it stands sparsity. Then the
search climbs from the gentlest setting. Each round tries the next bolder value of every field and takes the one that
leaves fewest pairs to read within the limit, until none does. Pairs are counted, so that a busy machine does not
change the result; times are measured, too. Everything that was tried is kept, so that a search that was stopped can
be resumed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any, NamedTuple

from nearfield._checks import wrong_value
from nearfield._files import BadFile, check_fields
from nearfield.methods import Method, method_classes
from nearfield.methods import fields as method_fields

Fields = dict[str, Any]

_DENSE = "dense"
LADDERS: Mapping[str, tuple[Any, ...]] = {
    "dense_steps": (0.3, 0.2, 0.1, 0),
    _DENSE: (0.5, 0.25, 0.125, 0.0),
}
"""What is tried of every method, from gentle to bold, behind what its own `ladders` say. "dense" is the share of layers
that stay dense, the touchiest first."""

MOST_GROUPS = 12


class Figures(NamedTuple):
    """What pictures of one setting gave.

    Args:
        lpips: mean distance to the dense model's pictures.
        pairs_kept: share of the pairs of tokens that are read, over all layers and steps.
        seconds_per_step: mean over the denoising steps.
    """

    lpips: float
    pairs_kept: float
    seconds_per_step: float


@dataclass(frozen=True)
class Trial:
    """One setting and its figures.

    Args:
        fields: all of the method's, so that a file of trials means the same when a default has changed.
        speed_up: over the dense model in the same run.
    """

    fields: Mapping[str, Any]
    lpips: float
    pairs_kept: float
    seconds_per_step: float
    speed_up: float
    purpose: str = "search"


Evaluate = Callable[[Method], Figures]


class Search:
    """One search.

    Args:
        method: whose fields are sought. Fields that are not on its ladders stay as they are.
        evaluate: makes pictures with a method and measures them.
        num_layers: of the model.
        dense_seconds: per step of the dense model.
        max_lpips: what the result may not exceed.
        ladders: by default `ladders_of(method)`.
        known: trials of an earlier run.
        on_trial: called with every new trial, before the next begins.
    """

    def __init__(
        self,
        method: Method,
        evaluate: Evaluate,
        num_layers: int,
        dense_seconds: float,
        max_lpips: float,
        *,
        ladders: Mapping[str, tuple[Any, ...]] | None = None,
        known: Iterable[Trial] = (),
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self.method, self.ladders = method, ladders_of(method) if ladders is None else ladders
        self.num_layers, self.dense_seconds, self.max_lpips = num_layers, dense_seconds, max_lpips
        self.trials = list(known)
        self._evaluate, self._on_trial = evaluate, on_trial
        self._touchiest: list[int] = []

    def run(self, has_time: Callable[[], bool] = lambda: True) -> bool:
        """Search; returns whether it came to its end before time was up."""
        ranking = self._rank_layers(has_time)
        if ranking is None:
            return False
        self._touchiest = ranking
        places = dict.fromkeys(self.ladders, 0)
        current = self._trial(self._fields(places))
        while current.lpips <= self.max_lpips:
            if not has_time():
                return False
            better = self._bolder(places, current)
            if better is None:
                break
            places, current = better
        return True

    @property
    def best(self) -> Trial | None:
        """What reads least of all that keep within the limit."""
        within = [trial for trial in self.trials if trial.lpips <= self.max_lpips and trial.pairs_kept < 1]
        return min(within, key=_boldest, default=None)

    def groups(self) -> list[tuple[int, ...]]:
        """Consecutive layers that are looked at together."""
        size = -(-self.num_layers // MOST_GROUPS)
        layers = range(self.num_layers)
        return [tuple(layers[start : start + size]) for start in range(0, self.num_layers, size)]

    # -- the steps of it -----------------------------------------------------------------------------------------

    def _rank_layers(self, has_time: Callable[[], bool]) -> list[int] | None:
        """Layers, those first whose sparsity moves the pictures most; None if time was up."""
        distances = []
        middle = {
            name: values[(len(values) - 1) // 2]
            for name, values in self.ladders.items()
            if name in self.method.ladders
        }
        for group in self.groups():
            if not has_time():
                return None
            others = tuple(layer for layer in range(self.num_layers) if layer not in group)
            fields = middle | {"dense_steps": 0, "dense_layers": others}
            distances.append((self._trial(fields, purpose="layers").lpips, group))
        ranked = sorted(distances, key=lambda item: (-item[0], item[1]))
        return [layer for _, group in ranked for layer in group]

    def _bolder(self, places: dict[str, int], current: Trial) -> tuple[dict[str, int], Trial] | None:
        """The setting within the limit that reads least, of the settings that are one value bolder than this one."""
        found = []
        for name, ladder in self.ladders.items():
            if places[name] + 1 < len(ladder):
                moved = places | {name: places[name] + 1}
                trial = self._trial(self._fields(moved))
                # As few will do: with few steps the next share of dense ones may be the same number.
                if trial.lpips <= self.max_lpips and trial.pairs_kept <= current.pairs_kept:
                    found.append((moved, trial))
        return min(found, key=lambda item: _boldest(item[1]), default=None)

    def _fields(self, places: Mapping[str, int]) -> Fields:
        chosen = {name: self.ladders[name][place] for name, place in places.items()}
        if _DENSE not in chosen:
            return chosen
        num_dense = round(chosen.pop(_DENSE) * self.num_layers)
        return chosen | {"dense_layers": tuple(sorted(self._touchiest[:num_dense]))}

    def _trial(self, fields: Fields, purpose: str = "search") -> Trial:
        method = changed(self.method, fields)
        every: Fields = method_fields.as_document(method)["fields"]
        for trial in self.trials:
            if _plain(trial.fields) == _plain(every) and trial.purpose == purpose:
                return trial
        figures = self._evaluate(method)
        trial = Trial(every, *figures, self.dense_seconds / figures.seconds_per_step, purpose)
        self.trials.append(trial)
        self._on_trial(trial)
        return trial


def ladders_of(method: Method, held: Collection[str] = ()) -> dict[str, tuple[Any, ...]]:
    """What is tried of a method, but for the fields that are held; refuses methods that do not say what to try."""
    if not method.ladders:
        named = ", ".join(name for name, kind in method_classes().items() if kind.ladders)
        wrong_value("method", f"say in `ladders` what to try ({named})", type(method).__name__)
    names = {_DENSE if name == "dense_layers" else name for name in held}
    return {name: values for name, values in {**method.ladders, **LADDERS}.items() if name not in names}


def changed(method: Any, fields: Mapping[str, Any]) -> Method:
    """The method with other fields; lists, as JSON returns them, are tuples there."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    found: Method = replace(method, **values)
    return found


def _boldest(trial: Trial) -> tuple[float, float]:
    return trial.pairs_kept, trial.lpips


def front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other beats in both distance and pairs, from the closest to the boldest."""
    fewest, kept = float("inf"), []
    for trial in sorted(trials, key=lambda trial: (trial.lpips, trial.pairs_kept)):
        if trial.pairs_kept < fewest:
            fewest = trial.pairs_kept
            kept.append(trial)
    return kept


def as_records(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    return [asdict(trial) for trial in trials]


def from_records(records: Iterable[Any], method: Method, source: object = "the records") -> list[Trial]:
    """Trials of a method, of plain values as JSON returns them; refuses others."""
    kinds = dict.fromkeys(("lpips", "pairs_kept", "seconds_per_step", "speed_up"), float)
    names = [each.name for each in dataclass_fields(Trial)]
    found = []
    for record in records:
        check_fields(source, record, {"fields": dict, "purpose": str, **kinds})
        try:
            changed(method, record["fields"])
        except (TypeError, ValueError) as error:
            raise BadFile(f"`fields` in {source} must be those of {method.name}: {error}") from None
        found.append(Trial(**{name: record[name] for name in names}))
    return found


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON returns it: tuples are lists there."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
