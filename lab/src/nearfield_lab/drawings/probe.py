"""Whether pictures show what was asked for: a linear probe on features of a network that knows nothing of drawings.

It learns the categories from drawings that no generator has seen, and is tried on others of these.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nearfield_lab.drawings.captions import Drawing, chance
from nearfield_lab.drawings.packed import category_of, is_held_out
from nearfield_lab.drawings.sets import CATEGORIES
from nearfield_lab.quality.efficientnet import load_efficientnet

_DECAY = 0.01
_STEPS = 200
_TRIED = 0.3  # of the drawings of a category: not learned from


class Split(NamedTuple):
    """Drawings that no generator has seen, of the categories."""

    learned: list[Drawing]
    tried: list[Drawing]


def split(drawings: Sequence[Drawing]) -> Split:
    """The drawings a probe learns from, and those it is tried on."""
    parts = Split([], [])
    for drawing in drawings:
        if is_held_out(drawing) and category_of(drawing) is not None:
            is_tried = chance(drawing.set, str(drawing.number), "tried") < _TRIED
            parts[is_tried].append(drawing)
    return parts


def labels(drawings: Sequence[Drawing]) -> Tensor:
    """The numbers of their categories."""
    return torch.tensor([CATEGORIES.index(category_of(drawing) or "") for drawing in drawings])


@torch.no_grad()
def features(batches: Iterable[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Features `[pictures, 1280]` of pictures `[B, 3, H, W]` uint8."""
    network = load_efficientnet(device)
    return torch.cat([network(batch.to(device)).cpu() for batch in batches])


class Probe(NamedTuple):
    """A linear classifier of the square roots of features, which are never negative and mostly small."""

    mean: Tensor
    std: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def learn(cls, found: Tensor, answers: Tensor) -> "Probe":
        """Logistic regression in which each category weighs the same, however many drawings it has."""
        found = found.sqrt()
        mean, std = found.mean(0), found.std(0).clamp(min=1e-6)
        inputs = (found - mean) / std
        weight = nn.Parameter(torch.zeros(len(CATEGORIES), found.shape[1]))
        bias = nn.Parameter(torch.zeros(len(CATEGORIES)))
        counts = torch.bincount(answers, minlength=len(CATEGORIES)).clamp(min=1)
        balance = len(answers) / (len(CATEGORIES) * counts.float())
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            wrong = cross_entropy(inputs @ weight.T + bias, answers, balance)
            total: Tensor = wrong + _DECAY * weight.square().sum()
            total.backward()
            return total

        optimizer.step(loss)
        return cls(mean, std, weight.detach(), bias.detach())

    def __call__(self, found: Tensor) -> Tensor:
        """The numbers of the categories that pictures are taken for."""
        return (((found.sqrt() - self.mean) / self.std) @ self.weight.T + self.bias).argmax(1)


class Score(NamedTuple):
    """How often pictures are taken for what they should be.

    Args:
        accuracy: the mean over categories.
        categories: of each.
        pictures: how many were looked at.
    """

    accuracy: float
    categories: dict[str, float]
    pictures: int


def score(probe: Probe, found: Tensor, answers: Tensor) -> Score:
    is_right = (probe(found) == answers).float()
    each = {
        name: float(is_right[answers == number].mean())
        for number, name in enumerate(CATEGORIES)
        if bool((answers == number).any())
    }
    return Score(sum(each.values()) / len(each), each, len(answers))
