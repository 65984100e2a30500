"""All that is measured of the embedded model's quality, in order of importance, within the minutes that are given.

    benchmarks/measure_quality.sh plan STATE MINUTES [NAME=VALUE]...

The same call again goes on where time was up, with the next batch of pictures or the next step of training. First a
few pictures of each pattern in the group "search" say which of them is tuned; that choice is kept in STATE/chosen.json,
and made anew when the group has changed. A call that names another one tunes that, and leaves the choice as it is. Then
pictures and training run side by side. What was done, what it took and what broke is in STATE/plan.json; what a part
printed, in STATE/printed. A part that breaks is tried again without --compile, and then left.

Names and values are the fields of `Settings`. Lists stand between commas, switches are yes or no. Those that figures
hang on stay as they are in STATE/plan.json.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import planned
from planned import Chain, Part, read_json

from nearfield._files import write_json
from nearfield.bench.kept_batches import digest
from nearfield.bench.picture_runs import method_of
from nearfield.bench.quality_cases import (
    GROUPS,
    SECTIONS,
    Pattern,
    as_file_name,
    pattern_named,
    tuned_name,
    without_dense_steps,
)
from nearfield.demo.lora import method_of_lora, suits
from nearfield.demo.model import EMBEDDED
from nearfield.demo.storage import BadFile
from nearfield.training import data
from nearfield.training.distill import LORA
from nearfield.training.runs import MODEL

DENSE = "dense"
CANDIDATES = [pattern.name for pattern in GROUPS["search"]]
FULL, NATIVE = "full", "native"
URGENT = 7
"""So many tables come before other ways of tuning."""
FIXED = ("size", "steps", "pairs", "weights")
"""What rows of one STATE have in common, though their names do not say it."""
FIXED_TUNING = ("tuning_steps", "cool_down", "equal_steps", "tuning_batch")
"""The same of tunings, once there is one."""


@dataclass(frozen=True)
class Settings:
    """What is measured, and how much of it.

    Args:
        size, steps, batch: of the pictures.
        screen, num, most: pictures of each pattern to choose by, of every pattern, and of the dense model and the
            chosen pattern before and after tuning.
        pairs: of the first so many each is held beside the dense one.
        tuned: the pattern that is tuned, one of the group "search"; empty: the one with the least FID.
        rank, tuning_steps, cool_down: of the LoRA that may ship.
        ranks, equal_steps: LoRAs that are compared after equally many steps, with "full" for all weights and "native"
            for flow matching with sparse attention.
        tuning_batch: samples per step.
        sections: tables to measure for, the first `URGENT` of them before other ways of tuning.
        lanes: parts side by side.
        compiled: use torch.compile.
    """

    size: int = 512
    steps: int = 16
    batch: int = 64
    screen: int = 512
    num: int = 1500
    most: int = 5000
    pairs: int = 512
    tuned: str = ""
    rank: int = 4
    tuning_steps: int = 400
    cool_down: int = 150
    ranks: tuple[str, ...] = ("4", "64", FULL, "16", NATIVE)
    equal_steps: int = 200
    tuning_batch: int = 32
    sections: tuple[str, ...] = tuple(SECTIONS)
    lanes: int = 3
    compiled: bool = True

    @classmethod
    def read(cls, words: Sequence[str]) -> "Settings":
        """From `name=value`; says what is wrong and ends the program."""
        settings = planned.read_settings(cls, words)
        ranks = [name for name in settings.ranks if name not in (FULL, NATIVE) and not name.isdecimal()]
        for name, wrong, known in (
            ("tuned", [] if settings.tuned in ("", *CANDIDATES) else [settings.tuned], CANDIDATES),
            ("sections", [name for name in settings.sections if name not in SECTIONS], list(SECTIONS)),
            ("ranks", ranks, ["numbers", FULL, NATIVE]),
        ):
            if wrong:
                sys.exit(f"`{name}` must be any of {'; '.join(known)}; got {wrong[0]!r}.")
        return settings


class Tuning(NamedTuple):
    """One way to tune the model for a pattern.

    Args:
        pattern: with every step sparse: dense ones have no part in tuning.
        rank: of the LoRA; or "full", or "native".
        is_equal: of as many steps as others that it is compared with.
    """

    pattern: Pattern
    rank: str
    is_equal: bool = True

    @property
    def way(self) -> str:
        return f"rank-{self.rank}-equal" if self.is_equal else f"rank-{self.rank}"

    @property
    def name(self) -> str:
        return f"{self.way}-of-{as_file_name(self.pattern.name)}"


class Plan(planned.Plan):
    """The parts of the campaign."""

    settings: Settings

    # -- the parts -----------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[Sequence[Part]]:
        yield Growing(self)

    def parts(self) -> Iterator[Part]:
        """All that is known to be done, the most important first. What is tuned is known once patterns were looked at;
        until then, what does not hang on it keeps lanes from standing idle."""
        settings = self.settings
        candidates = [pattern_named(name) for name in CANDIDATES]
        yield self.photographs()
        yield self.dense_pictures()
        yield from (self.pictures(pattern, settings.screen) for pattern in candidates)
        chosen = self.chosen()
        if chosen is None:
            yield self.pictures(None, settings.screen, settings.num, settings.most)
            yield from self._of_sections(is_urgent=True)
        else:
            yield from self._in_order(chosen, [pattern for pattern in candidates if pattern != chosen])

    def _in_order(self, chosen: Pattern, others: Sequence[Pattern]) -> Iterator[Part]:
        settings, best = self.settings, self.best(chosen)
        counts = settings.num, settings.most
        yield self.lora(chosen)
        yield self.pictures(None, settings.screen, *counts)
        yield self.pictures(chosen, *counts)
        yield self.pictures(self.tuned(chosen, best), *counts, after=best)
        yield from (self.pictures(pattern, settings.num) for pattern in others)
        yield from self._of_sections(is_urgent=True)
        if without_dense_steps(chosen) != chosen:
            yield self.pictures(self.tuned(without_dense_steps(chosen), best), settings.num, after=best)
        yield from self.compared(chosen)
        yield from self._of_sections(is_urgent=False)

    def _of_sections(self, *, is_urgent: bool) -> Iterator[Part]:
        """Patterns of tables, each once: of the first tables, or what others have beside those. Those that could be
        tuned are drawn for themselves."""
        sections = self.settings.sections
        urgent = dict.fromkeys(name for section in sections[:URGENT] for name in SECTIONS[section])
        others = dict.fromkeys(name for section in sections[URGENT:] for name in SECTIONS[section])
        names = urgent if is_urgent else [name for name in others if name not in urgent]
        patterns = (pattern_named(name) for name in names if name not in CANDIDATES)
        yield from (self.pictures(pattern, self.settings.num) for pattern in patterns)

    def photographs(self) -> Part:
        statistics = self.statistics()
        command = ["quality", str(self.state / "photographs"), "--save", str(statistics), "--metrics", "fid"]
        command += ["--size", str(self.settings.size), *self.network()]
        return Part("photographs", statistics.exists, lambda _: [[command]])

    def dense_pictures(self) -> Part:
        """Those that others are compared with. They need no photographs."""

        def chains(minutes: float) -> list[Chain]:
            command = self.measuring(None, (self.settings.screen,), minutes)
            return [[[*command, *self.compiling()]], [command]]

        return Part("dense-pictures", self.has_dense_pictures, chains)

    def pictures(self, pattern: Pattern | None, *counts: int, after: Tuning | None = None) -> Part:
        """Pictures of a pattern, measured, with a row for each number of them.

        Args:
            after: the tuning whose result they are made with.
        """
        name = pattern.name if pattern else DENSE

        def chains(minutes: float) -> list[Chain]:
            command = self.measuring(pattern, counts, minutes)
            if pattern is None:
                command.remove("--no-dense-row")
            return [[[*command, *self.compiling()]], [command]]

        def may_begin() -> bool:
            is_ready = self.statistics().exists() and self.has_dense_pictures()
            return is_ready and (after is None or self.is_tuned(after))

        return Part(
            f"pictures-{as_file_name(name)}-{max(counts)}",
            lambda: max(counts) in self.measured(name),
            chains,
            least=45.0,
            uses=str(self.report(as_file_name(name))),  # a file that one part alone may add rows to
            may_begin=may_begin,
        )

    def measuring(self, pattern: Pattern | None, counts: Sequence[int], minutes: float) -> list[str]:
        name = as_file_name(pattern.name if pattern else DENSE)
        listed, settings = self.state / "patterns" / f"{name}.json", self.settings
        write_patterns(listed, [] if pattern is None else [pattern])
        command = ["bench", "quality", "--photographs", str(self.state / "photographs")]
        command += ["--patterns", str(listed), "--out", str(self.report(name)), "--no-dense-row"]
        command += ["--num", ",".join(map(str, counts)), "--pairs", str(settings.pairs)]
        command += ["--size", str(settings.size), "--steps", str(settings.steps)]
        command += ["--batch", str(settings.batch), "--kept", str(self.state / "kept")]
        command += ["--strips", str(self.state / "strips"), "--minutes", str(minutes)]
        return [*command, *self.weights(), *self.network()]

    # -- tuning --------------------------------------------------------------------------------------------------

    def best(self, chosen: Pattern) -> Tuning:
        """That of the LoRA that may ship."""
        tuning = Tuning(without_dense_steps(chosen), str(self.settings.rank), is_equal=False)
        self._adopt_older(tuning)
        return tuning

    def _adopt_older(self, tuning: Tuning) -> None:
        """Folders once did not say of which pattern they are: one with a LoRA of this one's is called as it is now."""
        older, folder = self.folder(tuning).with_name(tuning.way), self.folder(tuning)
        if folder.exists() or not (older / LORA).exists():
            return
        with suppress(BadFile, ValueError):  # no LoRA that could be gone on with
            if suits(method_of_lora(older / LORA), method_of(tuning.pattern)):
                older.rename(folder)

    def lora(self, chosen: Pattern) -> Part:
        """The LoRA that may ship; on its way it is compared with others, if it is one of them."""
        settings = self.settings
        rank = ["--rank", str(settings.rank), "--keep-steps", str(settings.equal_steps)]
        rank += ["--cool-down", str(settings.cool_down)]
        return self.distilled(chosen, self.best(chosen), rank)

    def compared(self, chosen: Pattern) -> Iterator[Part]:
        """Ways of tuning after equally many steps, and their pictures."""
        for rank in self.settings.ranks:
            tuning = trained = Tuning(without_dense_steps(chosen), rank)
            if self._is_kept_on_the_way(chosen, tuning):
                trained = self.best(chosen)
            elif rank == NATIVE:
                yield self.native(chosen, tuning)
            else:
                yield self.distilled(chosen, tuning, ["--full"] if rank == FULL else ["--rank", rank])
            yield self.pictures(self.tuned(chosen, tuning), self.settings.num, after=trained)

    def _is_kept_on_the_way(self, chosen: Pattern, tuning: Tuning) -> bool:
        """Whether the LoRA that may ship is trained here, or was, which keeps what it had learned by then."""
        best = self.best(chosen)
        return tuning.rank == best.rank and (self.folder(best).exists() or not self.is_shown(chosen, best))

    def distilled(self, chosen: Pattern, tuning: Tuning, options: Sequence[str]) -> Part:
        def chains(minutes: float) -> list[Chain]:
            command = ["distill", *self.training(tuning, minutes), *self.weights(), *options]
            command += field_options(chosen.fields)
            return [[[*command, *self.compiling()]], [command]]

        return self.trained(chosen, tuning, chains)

    def native(self, chosen: Pattern, tuning: Tuning) -> Part:
        """Flow matching goes on with sparse attention, from the model's own weights."""

        def chains(minutes: float) -> list[Chain]:
            command = ["train", "demo", *self.training(tuning, minutes)]
            command += ["--start", str(self.model()), "--shift", "2"]
            # At the rate of all weights in `distill`: 1e-4 led away from a model that has been trained.
            command += ["--learning-rate", "3e-5", "--warm-up", "50", "--samples", "0"]
            # Not compiled: that would be the whole model, which takes longer than it saves.
            return [[[*command, "--method", "hilbert", *field_options(tuning.pattern.fields)]]]

        return self.trained(chosen, tuning, chains)

    def trained(self, chosen: Pattern, tuning: Tuning, chains: Any) -> Part:
        def is_done() -> bool:
            return self.is_tuned(tuning) or self.is_shown(chosen, tuning)

        return Part(f"tune-{tuning.name}", is_done, chains, least=75.0, uses="training")

    def training(self, tuning: Tuning, minutes: float) -> list[str]:
        folder = self.folder(tuning)
        words = ["--data", str(self.state / "photographs"), "--latents", str(self.state / "latents")]
        words += ["--out", str(folder), "--resume", "--json", str(folder / "last.json")]
        words += ["--size", str(self.settings.size)]
        words += ["--batch", str(self.settings.tuning_batch), "--steps", str(self.steps_of(tuning))]
        return [*words, "--minutes", str(minutes), "--checkpoint-seconds", "100"]

    def steps_of(self, tuning: Tuning) -> int:
        return self.settings.equal_steps if tuning.is_equal else self.settings.tuning_steps

    def is_tuned(self, tuning: Tuning) -> bool:
        """Whether a tuning has made all of its steps, and its result is here."""
        made = (read_json(self.folder(tuning) / "last.json") or {"step": 0})["step"]
        return made >= self.steps_of(tuning) and self.result(tuning).exists()

    def is_shown(self, chosen: Pattern, tuning: Tuning) -> bool:
        """Whether all pictures that a tuning is for were measured: on another machine it is not done again."""
        shown = self._shown_by(chosen, tuning)
        return all(count in self.measured(pattern.name) for pattern, count in shown)

    def _shown_by(self, chosen: Pattern, tuning: Tuning) -> Iterator[tuple[Pattern, int]]:
        """Pictures that cannot be made without a tuning, and how many."""
        settings = self.settings
        if tuning.is_equal:
            yield self.tuned(chosen, tuning), settings.num
            return
        yield self.tuned(chosen, tuning), settings.most
        yield self.tuned(without_dense_steps(chosen), tuning), settings.num
        if tuning.rank in settings.ranks and self.folder(tuning).exists():
            yield self.tuned(chosen, tuning._replace(is_equal=True)), settings.num

    def folder(self, tuning: Tuning) -> Path:
        return self.state / "tuned" / tuning.name

    def result(self, tuning: Tuning) -> Path:
        """What a tuning writes: a LoRA, or a model."""
        if tuning.rank in (FULL, NATIVE):
            return self.folder(tuning) / MODEL
        if tuning.is_equal and tuning.rank == str(self.settings.rank) and not self.folder(tuning).exists():
            return self.folder(tuning._replace(is_equal=False)) / "pytorch_lora_weights-steps.safetensors"
        return self.folder(tuning) / LORA

    def tuned(self, pattern: Pattern, tuning: Tuning) -> Pattern:
        """A pattern with the result of a tuning, under a name that says which."""
        how = {FULL: "all weights", NATIVE: "natively sparse"}.get(tuning.rank, f"LoRA of rank {tuning.rank}")
        result = str(self.result(tuning))
        own = {"weights": result} if tuning.rank in (FULL, NATIVE) else {"lora": result}
        name = tuned_name(pattern.name, f"{how}, {self.steps_of(tuning)} steps")
        return replace(pattern, name=name, **own)

    # -- what is known -------------------------------------------------------------------------------------------

    def chosen(self) -> Pattern | None:
        """The pattern that is tuned: one that this call names, or the choice."""
        choice = self._choice()
        name = self.settings.tuned or choice
        return None if name is None else pattern_named(name)

    def _choice(self) -> str | None:
        """The best of those that could be tuned, once all of them have been looked at; it is kept, and stays."""
        path = self.state / "chosen.json"
        known = read_json(path) or {}
        name = self._known_choice(known) or self._least_fid()
        if name is not None and (known.get("name"), known.get("among")) != (name, CANDIDATES):
            fields = dict(pattern_named(name).fields)
            write_json(path, {"name": name, "among": CANDIDATES, "fields": fields})
        return name

    def _known_choice(self, known: Mapping[str, Any]) -> str | None:
        """One that was made among other patterns is none."""
        is_known = known.get("among") == CANDIDATES and known.get("name") in CANDIDATES
        return known["name"] if is_known else None

    def _least_fid(self) -> str | None:
        looks = [self.pictures(pattern_named(name), self.settings.screen) for name in CANDIDATES]
        if not all(map(self.is_settled, looks)):
            return None
        found = {name: self.measured(name).get(self.settings.screen, float("inf")) for name in CANDIDATES}
        return min(CANDIDATES, key=lambda name: found[name])

    def measured(self, name: str) -> dict[int, float]:
        """FID by the number of pictures, of the rows with a name and of this plan's size and steps."""
        rows = (read_json(self.report(as_file_name(name))) or {"results": []})["results"]
        own = {"size": self.settings.size, "steps": self.settings.steps}
        return {
            row["samples"]: row["fid"]
            for row in rows
            if row["pattern"] == name and own.items() <= row["settings"].items()
        }

    def report(self, name: str) -> Path:
        return self.state / "quality" / f"{name}.json"

    def has_dense_pictures(self) -> bool:
        """Those that others are compared with; on a new machine they are missing, whatever was measured."""
        settings = self.settings
        wanted = -(-min(settings.pairs, settings.screen) // settings.batch)
        return len(list((self.state / "kept").glob("dense-*/*.safetensors"))) >= wanted

    def statistics(self) -> Path:
        """Where `bench quality` looks for those of the photographs."""
        known = _fingerprint(self.state / "photographs")
        return self.state / "kept" / f"photographs-{self.settings.size}-{known}.safetensors"

    # -- what commands share -------------------------------------------------------------------------------------

    def model(self) -> Path:
        """The embedded one, unless another file was staged."""
        path = self.state / "files" / "cats.safetensors"
        return path if path.exists() else EMBEDDED

    def weights(self) -> list[str]:
        return [] if self.model() == EMBEDDED else ["--weights", str(self.model())]

    def network(self) -> list[str]:
        path = self.state / "files" / "inception_fid_fp16.safetensors"
        return ["--inception", str(path)] if path.exists() else []

    def compiling(self) -> list[str]:
        """Where it broke twice and went well without, it is not tried any more."""
        saved = [record for record in self.records.values() if record.broke == 1 and record.status == "done"]
        return ["--compile"] if self.settings.compiled and len(saved) < 2 else []

    # -- what the machinery asks ---------------------------------------------------------------------------------

    @property
    def lanes(self) -> int:
        return self.settings.lanes

    def facts(self) -> dict[str, Any]:
        return {"weights": digest_of(self.model())}

    def check_fixed(self) -> None:
        """Ends the program where a setting that must stay is another one than before."""
        known = (read_json(self.state / "plan.json") or {}).get("settings", {})
        now = asdict(self.settings) | self.facts()
        has_tunings = any(any(self.state.glob(files)) for files in ("tuned/*", "quality/*-tuned-*.json"))
        for name in (*FIXED, *(FIXED_TUNING if has_tunings else ())):
            if known.get(name, now[name]) != now[name]:
                sys.exit(
                    f"`{name}` must be {known[name]}, as in {self.state / 'plan.json'}: other figures do not compare;"
                    f" got {now[name]}. Give it a STATE of its own."
                )


class Growing(Sequence[Part]):
    """A plan's parts, asked for anew whenever one can begin: more are known once it is known what is tuned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[Part]:
        return self._plan.parts()

    def __len__(self) -> int:
        return sum(1 for _ in self._plan.parts())

    def __getitem__(self, index: Any) -> Any:
        return list(self._plan.parts())[index]


@cache
def digest_of(weights: Path) -> str:
    return digest({}, weights)


@cache
def _fingerprint(photographs: Path) -> str:
    return data.fingerprint(data.pictures(photographs))[:12]


def write_patterns(path: Path, patterns: Sequence[Pattern]) -> None:
    """A file that `--patterns` reads; only where it would change, for a command may be reading it."""
    text = json.dumps([asdict(pattern) for pattern in patterns], indent=1)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def field_options(fields: Mapping[str, Any]) -> list[str]:
    """Fields of `Hilbert` as options."""
    words: list[str] = []
    for name, value in fields.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        else:
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)]
    return words


def _import_everything() -> None:
    """What children need, once for all; nothing that touches a GPU, which would not survive a fork."""
    import PIL.Image  # noqa: F401
    import torch._dynamo  # noqa: F401

    import nearfield.bench.quality
    import nearfield.quality.command
    import nearfield.training.distill
    import nearfield.training.flow  # noqa: F401

    with suppress(ImportError):  # the parts that need them will say so
        import peft  # noqa: F401

        from nearfield.demo.model import from_diffusers

        for name in ("FluxTransformer2DModel", "FlowMatchEulerDiscreteScheduler"):
            from_diffusers(name)


def main(words: Sequence[str]) -> int:
    if len(words) < 2:
        sys.exit(__doc__)
    plan = Plan(Path(words[0]), Settings.read(words[2:]), planned.ends_after(words[1]))
    try:
        plan.statistics()
    except OSError as error:
        sys.exit(f"`STATE` must hold photographs; got {words[0]}: {error}. Stage them first.")
    plan.check_fixed()
    _import_everything()
    return planned.carry_out(plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
