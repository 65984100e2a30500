"""A part of a model, and what is to be done in it."""

from dataclasses import dataclass

from torch import nn

from nearfield._types import Impl
from nearfield.diffusers.lora import Switch
from nearfield.diffusers.models.spec import Spec, TokenLayout
from nearfield.layout import Geometry
from nearfield.methods import Composition
from nearfield.parallel import Ranks


@dataclass(frozen=True, eq=False)
class TargetModule:
    """What does not change from call to call.

    Args:
        name: its path in the model; "" is the model itself.
        root: the model.
        spec: the facts about the model.
        impl: passed on to `attend`.
        ranks: those that its tokens are split over.
        lora: what rests in dense steps.
    """

    name: str
    module: nn.Module
    root: nn.Module
    spec: Spec
    method: Composition
    impl: Impl = "auto"
    ranks: Ranks | None = None
    lora: Switch | None = None

    def path(self, name: str) -> str:
        """Where something that has a name in this part is found in the model."""
        return f"{self.name}.{name}" if self.name else name

    def geometry(self, located: TokenLayout, sees_text: bool = True) -> Geometry:
        """Where the tokens of a call stand in layers that see the text, or do not."""
        return located.geometry(self.spec.text_first, sees_text)
