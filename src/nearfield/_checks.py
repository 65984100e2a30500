"""Every user-facing error, in one grammar: "`argument` must rule; got value. Hint"."""

from typing import NoReturn

import torch
from torch import Tensor


def _message(argument: str, rule: str, got: object, hint: str) -> str:
    return f"`{argument}` must {rule}; got {got}." + (f" {hint}" if hint else "")


def wrong_value(argument: str, rule: str, got: object, hint: str = "") -> NoReturn:
    raise ValueError(_message(argument, rule, got, hint))


def wrong_type(argument: str, rule: str, got: object, hint: str = "") -> NoReturn:
    raise TypeError(_message(argument, rule, got, hint))


def check_int(argument: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        wrong_type(argument, "be an integer", type(value).__name__)
    if value < at_least:
        wrong_value(argument, f"be at least {at_least}", value)


def check_bool(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        wrong_type(argument, "be True or False", repr(value))


def check_number(argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(argument, "be a number", repr(value))


def check_member(argument: str, value: object, allowed: tuple[object, ...], hint: str = "") -> None:
    if value not in allowed:
        wrong_value(argument, f"be one of {', '.join(map(repr, allowed))}", repr(value), hint)


def check_tensor(argument: str, value: object, *, dims: int, hint: str = "") -> None:
    if not isinstance(value, Tensor):
        wrong_type(argument, "be a tensor", type(value).__name__, hint)
    if value.dim() != dims:
        wrong_value(argument, f"have {dims} dimensions", shape_of(value), hint)


def check_same_device(argument: str, value: Tensor, other: str, device: torch.device) -> None:
    if value.device != device:
        wrong_value(
            argument, f"be on the device of `{other}` ({device})", value.device, "Move it with `.to(device)`."
        )


def shape_of(value: Tensor) -> str:
    return "shape [" + ", ".join(map(str, value.shape)) + "]"


def check_share(argument: str, value: float, *, above: float = 0.0) -> None:
    check_number(argument, value)
    if not above < value <= 1:
        wrong_value(argument, f"lie above {above:g}, up to 1", value)
