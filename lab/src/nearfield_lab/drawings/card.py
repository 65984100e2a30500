"""The model card: what a model of drawings is, of what it was made, and under which licences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfield_lab.drawings.model import DrawingConfig, load_model
from nearfield_lab.drawings.packed import licence_table, read_index
from nearfield_lab.embedded.model import num_parameters

_OPEN = "(to be filled in)"

_CARD = """\
# Model card: drawings

**What it is.** A diffusion transformer (diffusers' `FluxTransformer2DModel`, {blocks}) with a text encoder of
{text_blocks} blocks that was trained with it; {parameters} parameters in all. It makes icons, emoji and clip art from
a caption, in the latent space of TAEF2. It exists to show and to measure sparse attention on something real and small.

**Data.** {drawings} drawings of {sets} sets, all under licences that allow any use, with attribution or without; the
table below names authors and licences. Captions were made from the drawings' names, keywords and categories, with
words for the style of the set. {held_out} of the drawings were kept from the model for tests: the set `twemoji` as a
whole, half of the drawings in {categories} categories, and one in twelve of the others. Sets of logos were left
out, and drawings named after trade marks.

**Licence.** Apache-2.0, with attribution to the authors of the drawings: this card travels with the weights.

**Training.** Flow matching; one caption in ten left out, for guidance. {training}

**Packing.** 8-bit weights with a half-precision scale for every 64.

**Quality.** FID of 5,000 pictures against held-out drawings: {open}. An independent network takes {open} of its
pictures of {categories} categories for what was asked for, and {open} of real drawings for what they are.

**Limits.** It draws single objects in the styles of its sets. It cannot write, count or place things in a scene, knows
few names of persons and places, and knows only what the sets draw, with their views of the world. It should not be
used to judge how large models behave.

## Drawings

{table}"""


def card(data: Path, weights: Path | None = None) -> str:
    """The card of a model, or one to fill in."""
    from nearfield_lab.drawings.sets import CATEGORIES

    sets = read_index(data)["sets"]
    config, parameters, training = DrawingConfig(), _OPEN, _OPEN
    if weights is not None:
        model, _, facts = load_model(weights)
        config, parameters = model.config, f"{num_parameters(model):,}"
        runs = [*facts.get("earlier", ()), {"step": facts["step"], "recipe": facts["recipe"]}]
        training = _words_on(runs)
    return _CARD.format(
        blocks=f"{config.joint_blocks} joint and {config.single_blocks} single blocks, {config.heads} heads of"
        f" {config.head_dim}",
        text_blocks=config.text_blocks,
        parameters=parameters,
        drawings=f"{sum(one['drawings'] for one in sets):,}",
        held_out=f"{sum(one['held_out'] for one in sets):,}",
        sets=len(sets),
        categories=len(CATEGORIES),
        training=training,
        open=_OPEN,
        table=licence_table(sets),
    )


def _words_on(runs: Sequence[Mapping[str, Any]]) -> str:
    said = [
        f"{run['step']:,} steps of batch {run['recipe']['batch']} at {run['recipe']['size']} px"
        f" ({'dense' if run['recipe']['method'] == 'None' else run['recipe']['method']}, seed {run['recipe']['seed']})"
        for run in runs
    ]
    return "; then ".join(said) + ". The moving average of the weights is what is kept."
