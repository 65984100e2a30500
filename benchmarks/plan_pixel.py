"""All of the comparison of trainable attention on pixels, in order of importance, within the minutes that are given.

    benchmarks/train_pixel.sh plan STATE MINUTES [NAME=VALUE]...

The same call again goes on where time was up. Every part is a `nearfield` command in a process of its own, forked from
one that has imported everything, so that starting costs little and a part that breaks takes nothing with it. Parts run
alone where speed is measured or seconds of training count. All others run side by side after them, so that some compute
while others compile: pictures, FID, and ablations, whose steps alone count. What was done, what it took and what broke
is in STATE/plan.json; what a part printed, in STATE/printed.

Names and values are the fields of `Settings`. Lists stand between commas, switches are yes or no.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import planned
from planned import Chain, Part, read_json

ABLATIONS = {
    "loglinear-unenriched": ("--enrich", "0"),
    "loglinear-unweighted": ("--unweighted",),
    "loglinear-raster": ("--order", "raster"),
}


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
        lanes: parts side by side.
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
    lanes: int = 4
    compiled: bool = True
    tiny: bool = False

    @classmethod
    def read(cls, words: Sequence[str]) -> "Settings":
        """From `name=value`; says what is wrong and ends the program."""
        settings = planned.read_settings(cls, words)
        unknown = [name for name in settings.ablations if name not in ABLATIONS]
        if unknown:
            sys.exit(f"`ablations` must be any of {', '.join(ABLATIONS)}; got {unknown[0]!r}.")
        return settings


class Plan(planned.Plan):
    """The parts of the comparison."""

    settings: Settings

    # -- the parts -----------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[list[Part]]:
        """Parts that run side by side, group after group, the most important first."""
        settings = self.settings
        full, sparse = self.run("full"), [self.run(name) for name in settings.attention]
        ablations = [self.run(name) for name in settings.ablations]
        yield from ([self.speed(words)] for words in settings.benchmarks[:1])
        yield [self.pretraining(), *self.photographs()]
        yield from ([self.training(run)] for run in (full, *sparse))
        yield from ([self.speed(words)] for words in settings.benchmarks[1:])
        yield [
            *(self.training(run) for run in ablations),
            *self.pictures([full, *sparse], sparse),
            *self.pictures(ablations, []),
        ]
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
            lines = (read_json(report) or {"results": []})["results"]
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
        # Of ablations one trains at a time: several would not fit into a GPU's memory.
        return Part(
            f"train-{run}", lambda: all(path.exists() for path in kept), chains, needs=needs, uses="training"
        )

    def photographs(self) -> list[Part]:
        if not self.settings.pictures:
            return []
        statistics = self.statistics
        command = ["quality", str(self.state / "photographs"), "--save", str(statistics), *self.features()]
        return [Part("photographs", statistics.exists, lambda _: [[command]])]

    def pictures(self, of_steps: Sequence[str], of_seconds: Sequence[str]) -> list[Part]:
        """Pictures of models that were kept at equal steps and at equal time, and their distance to the photographs."""
        if not self.settings.pictures:
            return []
        models = [(run, "steps") for run in of_steps] + [(run, "seconds") for run in of_seconds]
        return [self.sampled(*model) for model in models]

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
            report = read_json(self.state / "bench" / f"{words.partition('x')[0]}.json") or {"results": []}
            rates = {
                result["dense_kernel"]: result["tokens_per_second"]
                for result in report["results"]
                if result["dense_kernel"] and result["tokens_per_second"]
            }
        return max(rates, key=lambda kernel: rates[kernel], default="auto")

    def equal_steps(self) -> int | None:
        """The steps that full attention made, if it did."""
        report = read_json(self.state / "runs" / self.run("full") / "last.json")
        return None if report is None else int(report["step"])

    # -- what the machinery asks ---------------------------------------------------------------------------------

    @property
    def lanes(self) -> int:
        return self.settings.lanes

    def is_end(self, group: Sequence[Part]) -> bool:
        """What follows training compares what was trained."""
        return any(part.name.startswith("train-") for part in group)

    def is_complete(self, command: Sequence[str]) -> bool:
        return command[0] != "sample" or _is_complete(Path(command[command.index("--json") + 1]))

    def facts(self) -> dict[str, int | None]:
        return {"equal_steps": self.equal_steps()}


def _is_complete(report: Path) -> bool:
    """Whether `sample`, which may stop in time, has made all pictures."""
    known = read_json(report)
    return known is not None and known["missing"] == 0


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
    plan = Plan(Path(words[0]), Settings.read(words[2:]), planned.ends_after(words[1]))
    _import_everything()
    return planned.carry_out(plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
