"""All of the comparison of trainable attention on pixels, in order of importance, within the minutes that are given.

    benchmarks/train_pixel.sh plan STATE MINUTES [NAME=VALUE]...

The same call again goes on where time was up. Every part is a `nearfield` command in a process of its own, forked from
one that has imported everything, so that starting costs little and a part that breaks takes nothing with it. Parts run
alone where speed is measured or seconds of training count; pictures, FID and the statistics of photographs run side by
side. What was done, what it took and what broke is in STATE/plan.json; what a part printed, in STATE/printed.

Names and values are the fields of `Settings`. Lists stand between commas, switches are yes or no.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

BEGUN = time.monotonic()  # importing takes seconds, too

import torch  # noqa: E402

from nearfield import cli  # noqa: E402
from nearfield._files import write_json  # noqa: E402

STARTING, ENDING = 20.0, 15.0  # seconds from a fork to the first step, and from the last step to the end
ABLATIONS = {
    "loglinear-unenriched": ("--enrich", "0"),
    "loglinear-unweighted": ("--unweighted",),
    "loglinear-raster": ("--order", "raster"),
}
Chain = list[list[str]]
"""Commands one after another."""


@dataclass(frozen=True)
class Settings:
    """What is compared, and how long each part may take.

    Args:
        small, small_batch, small_seconds: pixels per side, pictures per step and seconds of the pre-training that all
            runs start from.
        size, batch, seconds: of the runs that are compared. Full attention trains for so many seconds; every other one
            until it has made as many steps and taken as many seconds, and its model is kept at both moments.
        large, large_batch, large_seconds: of a last comparison of loss and looks, full beside log-linear; 0 for none.
        small_rate, rate: learning rates.
        attention, ablations: what is compared with full attention.
        pictures: of each kept model, for FID; 0 for none. A multiple of 64: a smaller last batch is compiled anew.
        sheet: pictures on the sample sheet at the end of a run.
        benchmarks: sizes at which training speed is measured, with their batch: 128x16,256x4.
        compiled, tiny: options of `train pixel`.
    """

    small: int = 32
    small_batch: int = 256
    small_seconds: float = 240.0
    small_rate: float = 4e-4
    size: int = 64
    batch: int = 64
    seconds: float = 90.0
    rate: float = 2e-4
    large: int = 128
    large_batch: int = 16
    large_seconds: float = 60.0
    attention: tuple[str, ...] = ("loglinear", "gated", "linear")
    ablations: tuple[str, ...] = tuple(ABLATIONS)
    pictures: int = 1024
    sheet: int = 16
    benchmarks: tuple[str, ...] = ("128x16", "256x4")
    compiled: bool = True
    tiny: bool = False

    @classmethod
    def read(cls, words: Sequence[str]) -> "Settings":
        """From `name=value`; says what is wrong and ends the program."""
        kinds = {each.name: type(each.default) for each in fields(cls)}
        values: dict[str, Any] = {}
        for word in words:
            name, equals, text = word.partition("=")
            if not equals or name not in kinds:
                sys.exit(f"`settings` must be name=value with names among {', '.join(kinds)}; got {word!r}.")
            try:
                values[name] = _value(kinds[name], text)
            except ValueError:
                sys.exit(f"`{name}` must be of kind {kinds[name].__name__}; got {text!r}.")
        unknown = [name for name in values.get("ablations", ()) if name not in ABLATIONS]
        if unknown:
            sys.exit(f"`ablations` must be any of {', '.join(ABLATIONS)}; got {unknown[0]!r}.")
        return cls(**values)


def _value(kind: type, text: str) -> Any:
    if kind is bool:
        if text not in ("yes", "no"):
            raise ValueError(text)
        return text == "yes"
    return tuple(filter(None, text.split(","))) if kind is tuple else kind(text)


class Part(NamedTuple):
    """Something that is done, or not yet.

    Args:
        name: of its file in STATE/printed.
        is_done: looks for its result.
        chains: makes its commands, for so many minutes; further ones for when the first broke.
        least: seconds below which it is not begun; parts that cannot go on later need all of their time.
        needs: files without which it is not begun.
        cost: seconds of the GPU, where several share it.
        most: seconds after which it must have hung.
    """

    name: str
    is_done: Callable[[], bool]
    chains: Callable[[float], list[Chain]]
    least: float = 60.0
    needs: tuple[Path, ...] = ()
    cost: float = 0.0
    most: float = float("inf")

    def can_begin(self, seconds: float) -> bool:
        return seconds >= self.least and all(path.exists() for path in self.needs)


@dataclass
class Record:
    """What is known of a part over all calls."""

    seconds: float = 0.0
    broke: int = 0
    status: str = "waiting"


@dataclass
class Plan:
    """The parts in their order, and what became of them."""

    state: Path
    settings: Settings
    ends: float
    records: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = _read(self.state / "plan.json") or {"parts": {}}
        self.records = {name: Record(**record) for name, record in known["parts"].items()}

    # -- the parts -----------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[list[Part]]:
        """Parts that run side by side, group after group, the most important first."""
        settings = self.settings
        full, sparse = self.run("full"), [self.run(name) for name in settings.attention]
        ablations = [self.run(name) for name in settings.ablations]
        first, rest = sparse[:1], sparse[1:]
        yield from ([self.speed(words)] for words in settings.benchmarks[:1])
        yield [self.pretraining(), *self.photographs()]
        yield from ([self.training(run)] for run in (full, *first))
        yield from self.pictures([full, *first], first)
        yield from ([self.speed(words)] for words in settings.benchmarks[1:])
        yield from ([self.training(run)] for run in rest)
        yield from self.pictures(rest, [])
        yield from ([self.training(run)] for run in ablations)
        yield from self.pictures(ablations, rest)
        if settings.large:
            yield from ([self.large(name)] for name in ("loglinear", "full"))

    def run(self, name: str) -> str:
        return f"{self.settings.size}-{name}"

    def speed(self, words: str) -> Part:
        size, _, batch = words.partition("x")
        report = self.state / "bench" / f"{size}.json"
        is_large = (
            int(size) >= 256
        )  # where a step with full attention takes seconds: by one kernel, few times

        def chains(_: float) -> list[Chain]:
            command = ["bench", "pixel", "--size", size, "--batch", batch, "--json", str(report)]
            command += ["--attention", ",".join(("full", *self.settings.attention)), *self.switches()]
            command += ["--rounds", "3" if is_large or self.settings.tiny else "5"]
            if is_large:
                command += ["--dense-kernels", self.dense_kernel()]
            return [[command], [[word for word in command if word != "--compile"]]]

        def is_done() -> bool:
            """Whether there is something to compare; a line that broke is a result, too."""
            lines = (_read(report) or {"results": []})["results"]
            return len([line for line in lines if line["tokens_per_second"]]) > 1

        return Part(f"bench-{size}", is_done, chains, least=30 if self.settings.tiny else 130, most=300)

    def pretraining(self) -> Part:
        settings = self.settings
        run, end = f"{settings.small}-full", ["--keep-seconds", str(settings.small_seconds)]
        sizes = settings.small, settings.small_batch, settings.small_rate
        return self.trained(run, sizes, ["--attention", "full"], end, None, "seconds")

    def training(self, run: str) -> Part:
        """A run that is compared: full attention as long as it may, others as many steps and as long."""
        settings = self.settings
        name = run.partition("-")[2]
        options = ["--attention", name.partition("-")[0], *ABLATIONS.get(name, ())]
        sizes = settings.size, settings.batch, settings.rate
        start = self.state / "runs" / f"{settings.small}-full" / "model-seconds.safetensors"
        seconds = ["--keep-seconds", str(settings.seconds)]
        if name == "full":
            return self.trained(run, sizes, options, seconds, start, "seconds")
        made = self.equal_steps()
        if made is None:  # it broke; what is left is to compare the others at equal time
            return self.trained(run, sizes, options, seconds, start, "seconds")
        steps = ["--keep-steps", str(made)]
        if name in ABLATIONS:
            return self.trained(run, sizes, options, steps, start, "steps")
        return self.trained(run, sizes, options, steps + seconds, start, "steps", "seconds")

    def large(self, name: str) -> Part:
        settings = self.settings
        sizes = settings.large, settings.large_batch, settings.rate
        start = self.state / "runs" / self.run("full") / "model-seconds.safetensors"
        end = ["--keep-seconds", str(settings.large_seconds)]
        return self.trained(f"{settings.large}-{name}", sizes, ["--attention", name], end, start, "seconds")

    def trained(
        self,
        run: str,
        sizes: tuple[int, int, float],
        attention: list[str],
        end: list[str],
        start: Path | None,
        *marks: str,
    ) -> Part:
        folder = self.state / "runs" / run
        size, batch, rate = map(str, sizes)

        def chains(minutes: float) -> list[Chain]:
            command = ["train", "pixel", "--out", str(folder), "--size", size, "--batch", batch, *self.data()]
            command += [
                "--learning-rate",
                rate,
                "--warm-up",
                "50",
                *attention,
                *end,
                "--minutes",
                str(minutes),
            ]
            command += ["--checkpoint-seconds", "100", "--sample-seconds", "1e6", "--resume"]
            command += ["--samples", str(self.settings.sheet)]
            command += ["--json", str(folder / "last.json"), *(["--init", str(start)] if start else [])]
            kernel = ["--dense-kernel", self.dense_kernel()] if "full" in attention else []
            plain = [*command, *(["--tiny"] if self.settings.tiny else [])]
            return [[[*command, *kernel, *self.switches()]], [plain]]

        kept = [folder / f"model-{mark}.safetensors" for mark in marks]
        needs = () if start is None else (start,)
        return Part(f"train-{run}", lambda: all(path.exists() for path in kept), chains, needs=needs)

    def photographs(self) -> list[Part]:
        if not self.settings.pictures:
            return []
        statistics = self.statistics
        command = ["quality", str(self.state / "photographs"), "--save", str(statistics), *self.features()]
        return [Part("photographs", statistics.exists, lambda _: [[command]])]

    def pictures(self, of_steps: Sequence[str], of_seconds: Sequence[str]) -> Iterator[list[Part]]:
        """Pictures of models that were kept at equal steps and at equal time, and their distance to the photographs."""
        if self.settings.pictures:
            models = [(run, "steps") for run in of_steps] + [(run, "seconds") for run in of_seconds]
            yield [self.sampled(*model) for model in models]

    def sampled(self, run: str, mark: str) -> Part:
        name = f"{run}-{mark}"
        report, made = self.state / "quality" / f"{name}.json", self.state / "quality" / f"{name}-made.json"
        # Full attention sets the measure: its model is the same at equal steps and at equal time.
        kept = "seconds" if run == self.run("full") else mark
        weights, images = (
            self.state / "runs" / run / f"model-{kept}.safetensors",
            self.state / "samples" / name,
        )

        def chains(minutes: float) -> list[Chain]:
            sample = ["sample", "--weights", str(weights), "--out", str(images), "--json", str(made)]
            sample += ["--num", str(self.settings.pictures), "--minutes", str(minutes), "--batch", "64"]
            measure = ["quality", str(images), str(self.statistics), "--json", str(report), *self.features()]
            rest = [measure] if self.statistics.exists() else []
            plain = [*sample, *self.data()]
            compiled = ["--compile"] if self.settings.compiled else []
            return [[[*plain, *compiled], *rest], [plain, *rest]]

        def is_done() -> bool:
            """Where photographs could not be measured, there are pictures to look at, and a loss."""
            return report.exists() or (not self.statistics.exists() and _is_complete(made))

        return Part(
            f"pictures-{name}",
            is_done,
            chains,
            least=40,
            needs=(weights,),
            cost=0.025 * self.settings.pictures,
        )

    # -- what commands share -------------------------------------------------------------------------------------

    @property
    def statistics(self) -> Path:
        return self.state / "quality" / f"photographs-{self.settings.size}.safetensors"

    def data(self) -> list[str]:
        return ["--data", str(self.state / "photographs"), "--pixels", str(self.state / "pixels")]

    def features(self) -> list[str]:
        network = self.state / "files" / "inception_fid_fp16.safetensors"
        return [
            *("--size", str(max(32, self.settings.size))),
            *(["--inception", str(network)] if network.exists() else []),
        ]

    def switches(self) -> list[str]:
        settings = self.settings
        return [*(["--compile"] if settings.compiled else []), *(["--tiny"] if settings.tiny else [])]

    def dense_kernel(self) -> str:
        """The kernel with which full attention was fastest, where that was measured."""
        rates: dict[str, float] = {}
        for words in self.settings.benchmarks[:1]:
            report = _read(self.state / "bench" / f"{words.partition('x')[0]}.json") or {"results": []}
            rates = {
                result["dense_kernel"]: result["tokens_per_second"]
                for result in report["results"]
                if result["dense_kernel"] and result["tokens_per_second"]
            }
        return max(rates, key=lambda kernel: rates[kernel], default="auto")

    def equal_steps(self) -> int | None:
        """The steps that full attention made, if it did."""
        report = _read(self.state / "runs" / self.run("full") / "last.json")
        return None if report is None else int(report["step"])

    # -- doing them ----------------------------------------------------------------------------------------------

    def carry_out(self) -> bool:
        """Do what there is time for; returns whether that was everything."""
        for group in self.groups():
            while begun := self._startable(group):
                self._side_by_side(begun, self.left)
            is_unfinished = any(not self.is_settled(part) for part in group)
            if is_unfinished and any(part.name.startswith("train-") for part in group):
                break  # what follows compares what this one trains
        return all(self.is_settled(part) for group in self.groups() for part in group)

    @property
    def left(self) -> float:
        """Seconds in which parts may run."""
        return self.ends - time.monotonic()

    def _startable(self, group: Sequence[Part]) -> list[Part]:
        """Parts to begin now: not so many side by side that none would end in time."""
        if self.left < STARTING + ENDING:
            return []
        begun: list[Part] = []
        for part in group:
            cost = sum(other.cost for other in begun) + part.cost
            fits = not begun or cost <= self.left - STARTING - ENDING
            if fits and not self.is_settled(part) and part.can_begin(self.left):
                begun.append(part)
        return begun

    def is_settled(self, part: Part) -> bool:
        record = self.record(part)
        if part.is_done():
            record.status = "done"
        return part.is_done() or record.broke >= len(part.chains(1.0))

    def record(self, part: Part) -> Record:
        return self.records.setdefault(part.name, Record())

    def _side_by_side(self, parts: Sequence[Part], left: float) -> None:
        started = time.monotonic()
        running: dict[int, Part] = {}
        for part in parts:
            chains = part.chains(max(1.0, left - STARTING - ENDING) / 60)
            chain = chains[min(self.record(part).broke, len(chains) - 1)]
            print(f"[{left:5.0f} s left] {part.name}", flush=True)
            printed = self.state / "printed" / f"{part.name}.txt"
            running[_forked(chain, printed, max(1, torch.get_num_threads() // len(parts)))] = part
        try:
            while running:
                last = self.ends + ENDING
                patience = {
                    child: min(last, started + part.most) - time.monotonic()
                    for child, part in running.items()
                }
                for child, code in _ended(patience):
                    part = running.pop(child)
                    self._note(part, code, time.monotonic() - started)
        finally:
            for child in running:
                os.kill(child, signal.SIGTERM)

    def _note(self, part: Part, code: int, seconds: float) -> None:
        record = self.record(part)
        record.seconds += seconds
        # Whoever ends early without a result, or with an error before it was asked to stop, would do so again.
        ran_out = self.left < 0 or (code == cli.OK and self.left < 2 * (STARTING + ENDING))
        record.status = "done" if part.is_done() else "going on" if ran_out else "broke"
        record.broke += record.status == "broke"
        print(f"  {part.name}: {record.status} after {seconds:.0f} s", flush=True)
        if record.status == "broke":
            print(_last_lines(self.state / "printed" / f"{part.name}.txt"), flush=True)
        self.write()

    def write(self) -> None:
        settings = asdict(self.settings) | {"equal_steps": self.equal_steps()}
        parts = {name: asdict(record) for name, record in self.records.items()}
        write_json(self.state / "plan.json", {"format": 1, "settings": settings, "parts": parts})


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file, if it is there."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _forked(chain: Chain, printed: Path, threads: int) -> int:
    """A child that runs commands until one fails; what they print is appended to a file. Returns its number."""
    printed.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    code = cli.FAILED
    try:
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        torch.set_num_threads(threads)
        for command in chain:
            print("$ nearfield", *command, flush=True)
            code = cli.main(command)
            is_sampling = command[0] == "sample"
            if code != cli.OK or (
                is_sampling and not _is_complete(Path(command[command.index("--json") + 1]))
            ):
                break
    except BaseException as error:  # a child may not return into the code of its parent
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = cli.FAILED
    finally:
        os._exit(code)


def _is_complete(report: Path) -> bool:
    """Whether `sample`, which may stop in time, has made all pictures."""
    known = _read(report)
    return known is not None and known["missing"] == 0


def _ended(children: Mapping[int, float]) -> list[tuple[int, int]]:
    """Children that have ended, with their codes; whoever has no more time is asked to stop, then made to.

    Args:
        children: the seconds that each has left.
    """
    found = []
    for child, patience in children.items():
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            found.append((child, os.waitstatus_to_exitcode(status)))
        elif patience < 0:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL if patience < -ENDING else signal.SIGTERM)
    if not found:
        time.sleep(0.1 if min(children.values()) >= 0 else 1.0)
    return found


def _last_lines(path: Path, number: int = 12) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return "\n".join(f"    {line}" for line in lines[-number:])


def _import_everything() -> None:
    """What children need, once for all; nothing that touches a GPU, which would not survive a fork."""
    import PIL.Image  # noqa: F401
    import torch._dynamo  # noqa: F401

    import nearfield.bench.pixel
    import nearfield.quality.command
    import nearfield.training.pixel  # noqa: F401


def main(words: Sequence[str]) -> int:
    if len(words) < 2:
        sys.exit(__doc__)
    state, minutes = Path(words[0]), float(words[1])
    plan = Plan(state, Settings.read(words[2:]), BEGUN + 60 * minutes - ENDING)
    _import_everything()
    is_everything = plan.carry_out()
    plan.write()
    for name, record in plan.records.items():
        print(f"{name:40} {record.status:10} {record.seconds:6.0f} s")
    print("all is done" if is_everything else "time is up; the same call goes on")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
