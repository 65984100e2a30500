"""Work for a machine that may be lost: parts in order of importance, within minutes; the same call again goes on.

Every part is a `nearfield` command, or several in turn, in a process of its own, forked from one that has imported
everything: starting costs little, and a part that breaks takes nothing with it. What was done, what it took and what
broke is in STATE/plan.json; what a part printed, in STATE/printed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

BEGUN = time.monotonic()  # importing takes seconds, too

import torch  # noqa: E402

from nearfield import cli  # noqa: E402
from nearfield._files import write_json  # noqa: E402

STARTING, ENDING = 10.0, 12.0  # seconds from a fork to the first step, and from the last step to the end
Chain = list[list[str]]
"""Commands one after another."""

Settings = TypeVar("Settings")


def read_settings(kind: type[Settings], words: Sequence[str]) -> Settings:
    """A dataclass from `name=value`; says what is wrong and ends the program.

    Lists stand between commas, switches are yes or no.
    """
    kinds = {each.name: type(each.default) for each in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in kinds:
            sys.exit(f"`settings` must be name=value with names among {', '.join(kinds)}; got {word!r}.")
        try:
            values[name] = _value(kinds[name], text)
        except ValueError:
            sys.exit(f"`{name}` must be of kind {kinds[name].__name__}; got {text!r}.")
    return kind(**values)


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
        may_begin: whether what else it builds on is there.
        cost: seconds of the GPU, where several share it.
        most: seconds after which it must have hung.
        uses: what only one part may use at a time; empty: nothing of the kind.
    """

    name: str
    is_done: Callable[[], bool]
    chains: Callable[[float], list[Chain]]
    least: float = 60.0
    needs: tuple[Path, ...] = ()
    cost: float = 0.0
    most: float = float("inf")
    uses: str = ""
    may_begin: Callable[[], bool] = lambda: True

    def can_begin(self, seconds: float) -> bool:
        return seconds >= self.least and all(path.exists() for path in self.needs) and self.may_begin()


@dataclass
class Record:
    """What is known of a part over all calls."""

    seconds: float = 0.0
    broke: int = 0
    status: str = "waiting"


class _Running(NamedTuple):
    part: Part
    since: float


@dataclass
class Plan(ABC):
    """The parts in their order, and what became of them.

    Args:
        ends: when the last of them must have ended, by the monotonic clock.
    """

    state: Path
    settings: Any
    ends: float
    records: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = read_json(self.state / "plan.json") or {"parts": {}}
        self.records = {name: Record(**record) for name, record in known["parts"].items()}

    # -- what a plan says ----------------------------------------------------------------------------------------

    @abstractmethod
    def groups(self) -> Iterator[list[Part]]:
        """Parts that may run side by side, group after group, the most important first."""

    @property
    def lanes(self) -> int:
        """How many parts may run side by side."""
        return sys.maxsize

    def is_end(self, group: Sequence[Part]) -> bool:
        """Whether nothing that follows can be begun while something of a group is left."""
        return False

    def is_complete(self, command: Sequence[str]) -> bool:
        """Whether a command that ended well, perhaps because its time was up, has done all of its work."""
        return True

    def facts(self) -> dict[str, Any]:
        """What plan.json says beside the settings."""
        return {}

    # -- doing it ------------------------------------------------------------------------------------------------

    def carry_out(self) -> bool:
        """Do what there is time for; returns whether that was everything."""
        for group in self.groups():
            self._carry_out(group)
            if self.is_end(group) and any(not self.is_settled(part) for part in group):
                break
        return all(self.is_settled(part) for group in self.groups() for part in group)

    @property
    def left(self) -> float:
        """Seconds in which parts may run."""
        return self.ends - time.monotonic()

    def is_settled(self, part: Part) -> bool:
        record = self.record(part)
        if part.is_done():
            record.status = "done"
        return part.is_done() or record.broke >= len(part.chains(1.0))

    def record(self, part: Part) -> Record:
        return self.records.setdefault(part.name, Record())

    def _carry_out(self, group: Sequence[Part]) -> None:
        """Whenever a part ends the next one is begun, until none can be."""
        running: dict[int, _Running] = {}
        beside, has_changed = min(len(group), self.lanes), True
        try:
            while True:
                for part in self._startable(group, running) if has_changed else ():
                    running[self._started(part, beside)] = _Running(part, time.monotonic())
                if not running:
                    return
                found = ended(self._patience(running))
                for child, code in found:
                    part, since = running.pop(child)
                    self._note(part, code, time.monotonic() - since)
                has_changed = bool(found)
        finally:
            for child in running:
                os.kill(child, signal.SIGTERM)

    def _startable(self, group: Sequence[Part], running: Mapping[int, _Running]) -> list[Part]:
        """Parts to begin now: not so many side by side that none would end in time."""
        if self.left < STARTING + ENDING:
            return []
        begun: list[Part] = []
        already = [each.part for each in running.values()]
        for part in group:
            beside = [*already, *begun]
            cost = sum(other.cost for other in beside) + part.cost
            fits = not beside or (
                len(beside) < self.lanes
                and cost <= self.left - STARTING - ENDING
                and not any(part.uses and part.uses == other.uses for other in beside)
            )
            is_running = any(part.name == other.name for other in already)
            if fits and not is_running and not self.is_settled(part) and part.can_begin(self.left):
                begun.append(part)
        return begun

    def _started(self, part: Part, beside: int) -> int:
        chains = part.chains(max(1.0, self.left - STARTING - ENDING) / 60)
        chain = chains[min(self.record(part).broke, len(chains) - 1)]
        print(f"[{self.left:5.0f} s left] {part.name}", flush=True)
        printed = self.state / "printed" / f"{part.name}.txt"
        return forked(chain, printed, max(1, torch.get_num_threads() // beside), self.is_complete)

    def _patience(self, running: Mapping[int, _Running]) -> dict[int, float]:
        """Seconds that each child has left."""
        last, now = self.ends + ENDING, time.monotonic()
        return {child: min(last, since + part.most) - now for child, (part, since) in running.items()}

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
        parts = {name: asdict(record) for name, record in self.records.items()}
        settings = asdict(self.settings) | self.facts()
        write_json(self.state / "plan.json", {"format": 1, "settings": settings, "parts": parts})


def carry_out(plan: Plan) -> int:
    """Do it, and say what was done."""
    is_everything = plan.carry_out()
    plan.write()
    for name, record in plan.records.items():
        print(f"{name:40} {record.status:10} {record.seconds:6.0f} s")
    print("all is done" if is_everything else "time is up; the same call goes on")
    return cli.OK


def ends_after(minutes: str) -> float:
    """When parts must have ended, for a program that was given so many minutes."""
    return BEGUN + 60 * float(minutes) - ENDING


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file, if it is there."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


# -- children --------------------------------------------------------------------------------------------------------


def forked(
    chain: Chain, printed: Path, threads: int, is_complete: Callable[[Sequence[str]], bool] = lambda _: True
) -> int:
    """A child that runs commands until one fails or is not complete; returns its number.

    What they print is appended to a file.
    """
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
            code = _run(command, is_last=command is chain[-1])
            if code != cli.OK or not is_complete(command):
                break
    except BaseException as error:  # a child may not return into the code of its parent
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = cli.FAILED
    finally:
        os._exit(code)


def _run(command: Sequence[str], is_last: bool) -> int:
    """Run a command here; in a new process where this one cannot use its GPU, because its parent has touched it."""
    if not torch.cuda._is_in_bad_fork():
        return cli.main(list(command))
    words = [sys.executable, "-m", "nearfield", *command]
    if is_last:
        os.execv(sys.executable, words)  # so that it hears what this process is told
    return subprocess.call(words)


def ended(children: Mapping[int, float]) -> list[tuple[int, int]]:
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
