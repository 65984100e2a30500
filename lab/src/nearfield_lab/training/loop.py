"""The loop that all training shares: AdamW, moving averages, checkpoints, exact resumption, a budget of time.

A step is a function of its number: whoever computes the loss draws its batch, noise and noise levels from generators
seeded with it. So a checkpoint holds no random state, and a run that was killed goes on as if nothing had happened.
"""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nearfield._checks import check_int, wrong_value
from nearfield._files import check_fields, parsed_json, replace_file
from nearfield_lab.storage import BadFile, read_tensors, write_tensors

CHECKPOINT, PREVIOUS, LOG = "checkpoint.safetensors", "checkpoint-previous.safetensors", "log.jsonl"
FORMAT = 1

_FETCH = 20  # steps between looks at the loss: each one waits for the device
_CLOSE = 5  # the same where a moment must not be missed by much

Ending = Literal["steps", "minutes", "stopped"]
Mark = Literal["steps", "seconds"]
"""A moment whose model is kept: by the number of steps done, or by the seconds they took."""

LossOf = Callable[[int, int], Tensor]
"""The loss of a step (from 0) and of one of its parts."""


class Diverged(Exception):
    """The loss is not a number any more. The last checkpoint was left as it is."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Args:
        steps: to reach in all, over all runs; None: no end but the budget's.
        minutes: budget of this run; None: no limit.
        learning_rate: after `warm_up` steps; over the last `cool_down` of `steps` it falls to zero.
        average: decay of the moving average of the weights, which is what is saved as the model.
        clip: largest norm of the gradient.
        parts: pieces of a batch that are computed one after another, to save memory.
        checkpoint_seconds: time between checkpoints.
        keep_steps, keep_seconds: keep the model after this number of steps, and after steps have taken this long, over
            all runs, without pauses and what the first step of a run compiles. Without `steps`, training ends when
            both have come.
    """

    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 4e-4
    warm_up: int = 200
    cool_down: int = 0
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    average: float = 0.999
    clip: float = 1.0
    parts: int = 1
    checkpoint_seconds: float = 120.0
    keep_steps: int | None = None
    keep_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None and not self.marks:
            wrong_value("steps", "be given, or `minutes`", None, "Training has to end somewhere.")
        for name in ("warm_up", "cool_down"):
            check_int(name, getattr(self, name), at_least=0)
        check_int("parts", self.parts, at_least=1)
        if self.cool_down and self.steps is None:
            wrong_value("cool_down", "be 0 where `steps` is not given", self.cool_down)

    @property
    def marks(self) -> tuple[Mark, ...]:
        wanted: dict[Mark, float | None] = {"steps": self.keep_steps, "seconds": self.keep_seconds}
        return tuple(mark for mark, value in wanted.items() if value is not None)

    def has_passed(self, mark: Mark, step: int, seconds: float) -> bool:
        """Whether a mark was reached after a number of steps, which took some seconds."""
        if mark == "steps":
            return self.keep_steps is not None and step >= self.keep_steps
        return self.keep_seconds is not None and seconds >= self.keep_seconds

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        factor = min(1.0, (step + 1) / max(1, self.warm_up))
        if self.cool_down and self.steps is not None:
            factor = min(factor, max(0.0, (self.steps - step) / self.cool_down))
        return self.learning_rate * factor


class Outcome(NamedTuple):
    """What a run came to.

    Args:
        ending: "steps" all were done, "minutes" the time was up, "stopped" by a signal.
        loss: mean over the last steps of this run; NaN if there was none.
        losses: of every step of this run.
        tokens_per_second: without pauses and the first step, which compiles; None where nobody said what a step holds.
        training_seconds: what all steps took, of earlier runs, too, without pauses and compiling.
    """

    step: int
    ending: Ending
    loss: float
    losses: tuple[float, ...]
    seconds: float
    tokens_per_second: float | None = None
    training_seconds: float = 0.0


class Loop:
    """Trains named parameters in a folder.

    Args:
        facts: what a checkpoint must agree with to be gone on from (the recipe).
        tokens: how many a step computes; the log then holds the speed, too.
        as_now: makes of an older checkpoint's facts what `facts` would be now.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        loss: LossOf,
        schedule: Schedule,
        folder: Path,
        facts: Mapping[str, Any],
        tokens: int | None = None,
        as_now: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> None:
        self.parameters = dict(parameters)
        self.averages = {name: value.detach().clone() for name, value in self.parameters.items()}
        self.schedule, self.folder = schedule, folder
        self.step = 0
        self._loss, self._facts, self._as_now = loss, dict(facts), as_now
        self._speed = _Speed(tokens)
        values = list(self.parameters.values())
        self._optimizer = torch.optim.AdamW(
            values,
            lr=schedule.learning_rate,
            betas=schedule.betas,
            weight_decay=schedule.weight_decay,
            fused=values[0].is_cuda,
        )

    # -- running -------------------------------------------------------------------------------------------------

    def run(
        self,
        on_step: Callable[[int, float | None], None] | None = None,
        on_pause: Callable[[], None] | None = None,
        pause_seconds: float = math.inf,
        on_mark: Callable[[Mark], None] | None = None,
    ) -> Outcome:
        """Train until an end is reached. Ctrl-C and a request to terminate end it after the step, with a checkpoint.

        Args:
            on_step: called with the number of steps done and the last known loss.
            on_pause: called every `pause_seconds` (to draw samples), and at the end.
            on_mark: called when a mark of the schedule is reached, to keep the model.
        """
        if self.step == 0:
            (self.folder / LOG).unlink(missing_ok=True)  # of another run
        started = saved = paused = self._speed.restart()
        pending, losses = list[Tensor](), list[float]()
        ending: Ending | None = None
        ahead = [mark for mark in self.schedule.marks if not self._has_passed(mark)]

        def look() -> None:
            losses.extend(self._fetched(pending))
            for mark in [mark for mark in ahead if self._has_passed(mark)]:
                ahead.remove(mark)
                if on_mark is not None:
                    on_mark(mark)
                    self._speed.restart()

        with _Signals() as signals:
            while (ending := self._ending(started, signals)) is None:
                pending.append(self.advance())
                if len(pending) >= self._look_after or self.step == self.schedule.keep_steps:
                    look()
                if on_step is not None:
                    on_step(self.step, losses[-1] if losses else None)
                now = time.monotonic()
                if now - saved > self.schedule.checkpoint_seconds:
                    look()
                    self.save()
                    saved = self._speed.restart()
                if on_pause is not None and now - paused > pause_seconds:
                    look()
                    on_pause()
                    paused = self._speed.restart()
            look()
            self.save()
            if on_pause is not None:
                on_pause()
        recent = losses[-100:]
        mean = sum(recent) / len(recent) if recent else math.nan
        seconds = time.monotonic() - started
        speed = self._speed.mean()
        return Outcome(self.step, ending, mean, tuple(losses), seconds, speed, self._speed.seconds)

    @property
    def _look_after(self) -> int:
        """Steps between looks; the first one of a run, which compiles, is looked at alone."""
        if not self._speed.is_warm:
            return 1
        return _CLOSE if self.schedule.keep_seconds is not None else _FETCH

    def _has_passed(self, mark: Mark) -> bool:
        return self.schedule.has_passed(mark, self.step, self._speed.seconds)

    def _ending(self, started: float, signals: "_Signals") -> Ending | None:
        schedule = self.schedule
        if signals.came:
            return "stopped"
        if schedule.steps is not None and self.step >= schedule.steps:
            return "steps"
        if schedule.minutes is not None and time.monotonic() - started > 60 * schedule.minutes:
            return "minutes"
        if schedule.steps is None and schedule.marks and all(map(self._has_passed, schedule.marks)):
            return "steps"
        return None

    def advance(self) -> Tensor:
        """Make one step; its loss stays on the device."""
        total: Tensor | None = None
        for part in range(self.schedule.parts):
            loss = self._loss(self.step, part) / self.schedule.parts
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        values: list[Tensor] = list(self.parameters.values())
        nn.utils.clip_grad_norm_(values, self.schedule.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        # Young averages follow quickly, so that they do not remember the random start.
        decay = min(self.schedule.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averages.values()), values, 1 - decay)
        assert total is not None
        return total

    def _fetched(self, pending: list[Tensor]) -> list[float]:
        """The losses of the steps since the last look, written to the log."""
        if not pending:
            return []
        losses: list[float] = torch.stack(pending).tolist()
        pending.clear()
        if not all(map(math.isfinite, losses)):
            raise Diverged(
                f"the loss is {losses[-1]} near step {self.step}; go on from the last checkpoint with a lower rate"
            )
        first = self.step - len(losses) + 1
        look = self._speed.of(len(losses))
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            for number, loss in enumerate(losses, first):
                line = {"step": number, "loss": loss, "seconds": round(look.at(number - first), 6)}
                file.write(json.dumps(line | look.speed) + "\n")
        return losses

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the averages for weights."""
        kept = {name: value.detach().clone() for name, value in self.parameters.items()}
        self._put(self.averages)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Weights, averages and the optimizer's state in one file. The one before it is kept, in case it is damaged."""
        groups: dict[str, Mapping[str, Tensor]] = {"weight": self.parameters, "average": self.averages}
        state = self._optimizer.state
        for kind in ("exp_avg", "exp_avg_sq"):
            groups[kind] = {
                name: state[value][kind] for name, value in self.parameters.items() if value in state
            }
        tensors = {f"{kind}/{name}": value for kind, part in groups.items() for name, value in part.items()}
        facts = {"format": FORMAT, "kind": "checkpoint", "step": self.step, "recipe": self._facts}
        path, previous = self.folder / CHECKPOINT, self.folder / PREVIOUS
        if path.exists():
            with suppress(OSError):  # of a file system without links
                previous.unlink(missing_ok=True)
                os.link(path, previous)
        write_tensors(path, tensors, facts)

    def resume(self) -> None:
        """Go on from the folder's checkpoint."""
        path = self.folder / CHECKPOINT
        device = str(next(iter(self.averages.values())).device)
        try:
            tensors, facts = read_tensors(path, device)
        except BadFile as error:
            raise BadFile(f"{error}.{self._offer()}") from None
        self._check_checkpoint(path, facts)
        groups = dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            groups.setdefault(kind, {})[rest] = tensor
        shapes = {name: value.shape for name, value in self.parameters.items()}
        kinds = ("weight", "average", "exp_avg", "exp_avg_sq") if facts["step"] else ("weight", "average")
        for kind in kinds:
            found = {name: value.shape for name, value in groups.get(kind, {}).items()}
            if found != shapes and not (kind.startswith("exp") and found.items() <= shapes.items()):
                raise BadFile(f"{path} holds other parameters than this model has")
        self._put(groups["weight"])
        # In the order of the parameters: a file has its own.
        self.averages = {name: groups["average"][name] for name in self.parameters}
        self.step = facts["step"]
        if self.step:
            self._load_optimizer(groups["exp_avg"], groups["exp_avg_sq"])
        self._cut_log()

    def _offer(self) -> str:
        """What to do about a damaged checkpoint: the one before it, if that is whole."""
        path = self.folder / PREVIOUS
        try:
            step = read_tensors(path, fields={"step": int})[1]["step"]
        except OSError:
            return " Remove it to train anew, or name another folder"
        return f" The one before it, {path}, of step {step:,}, is whole: rename it to {CHECKPOINT} to go on"

    def _check_checkpoint(self, path: Path, facts: Mapping[str, Any]) -> None:
        if facts.get("kind") != "checkpoint" or facts.get("format") != FORMAT:
            raise BadFile(f"{path} is no checkpoint that this version reads")
        check_fields(path, facts, {"step": int, "recipe": dict})
        asked, found = json.loads(json.dumps(self._facts)), self._as_now(facts["recipe"])
        for name in sorted(asked.keys() | found.keys()):
            if asked.get(name) != found.get(name):
                was, now = found.get(name), asked.get(name)
                raise BadFile(
                    f"{path} was made with {name} = {was}, not {now}; resume with the same settings"
                )

    def _load_optimizer(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        # torch's own loading puts everything where this kind of optimizer keeps it.
        document = self._optimizer.state_dict()
        document["state"] = {
            number: {
                "step": torch.tensor(float(self.step)),
                "exp_avg": first[name],
                "exp_avg_sq": second[name],
            }
            for number, name in enumerate(self.parameters)
            if name in first
        }
        self._optimizer.load_state_dict(document)

    def _cut_log(self) -> None:
        """Forget what was logged after the checkpoint: it will be done again."""
        path = self.folder / LOG
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes().splitlines():
            with suppress(BadFile):  # half a line, which was being written
                known = parsed_json(path, line)
                check_fields(path, known, {"step": int, "seconds": float})
                if known["step"] <= self.step:
                    kept.append(known)
        text = "".join(json.dumps(known) + "\n" for known in kept)
        replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))
        self._speed.seconds = kept[-1]["seconds"] if kept else 0.0


class _Look(NamedTuple):
    """What is known of some steps: when the last one ended, what each took, and their speed."""

    steps: int
    end: float
    each: float
    speed: dict[str, float]

    def at(self, place: int) -> float:
        """When one of the steps ended, in seconds of training."""
        return self.end - (self.steps - 1 - place) * self.each


class _Speed:
    """Seconds and tokens per second between looks at the loss, when the device has done what it was given.

    The first look of a run is at a step that compiles: it counts as if it had taken what the following ones take.
    """

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.seconds = 0.0
        self.is_warm = False
        self._uncounted = 0
        self._since = time.monotonic()
        self._looks = list[tuple[int, float]]()

    def restart(self) -> float:
        """What was done since the last look is not computing; returns the time."""
        self._since = time.monotonic()
        return self._since

    def of(self, steps: int) -> _Look:
        """What the log says about the steps since the last look."""
        before = self._since
        seconds = self.restart() - before
        each = seconds / steps if self.is_warm else 0.0
        self.seconds += each * (steps + self._uncounted)
        self._uncounted = 0 if self.is_warm else steps
        self.is_warm = True
        if self.tokens is None or seconds <= 0:
            return _Look(steps, self.seconds, each, {})
        self._looks.append((steps, seconds))
        speed = {"tokens_per_second": round(steps * self.tokens / seconds, 1)}
        return _Look(steps, self.seconds, each, speed)

    def mean(self) -> float | None:
        looks = self._looks[1:] or self._looks
        if self.tokens is None or not looks:
            return None
        return self.tokens * sum(steps for steps, _ in looks) / sum(seconds for _, seconds in looks)


class _Signals:
    """Remembers that the process was asked to stop, instead of stopping in the middle of a step."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread, where signals are somebody else's affair
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self.came = True


class Draws:
    """Random numbers of a step, equal in every run: a generator per device, seeded anew for each step and part."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self._generator = torch.Generator(device)
        self._order: tuple[int, Tensor] | None = None

    def generator(self, step: int, part: int = 0) -> torch.Generator:
        return self._generator.manual_seed((self.seed * 2**20 + step) * 2**8 + part)

    def indices(self, step: int, part: int, batch: int, parts: int, total: int) -> Tensor:
        """Which samples a part of a step takes: every sample once per epoch, in an order of the epoch's own."""
        size = batch // parts
        start = step * batch + part * size
        places = range(start, start + size)
        return torch.stack([self._permutation(place // total, total)[place % total] for place in places])

    def _permutation(self, epoch: int, total: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(total, generator=generator)
        return self._order[1]
