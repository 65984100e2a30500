"""Which sets of drawings are used, in which styles, under which licences."""

from collections.abc import Mapping
from dataclasses import dataclass, field

OPEN_LICENCES = {
    "Apache-2.0",
    "BSD-3-Clause",
    "CC-BY-3.0",
    "CC-BY-4.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "OFL-1.1",
    "Unlicense",
    "publicdomain",
}
"""Of every set that is used. None asks that what is made from it be shared alike, or not sold."""

HELD_OUT = "twemoji"
"""The set that no generator learns from, whole. It draws what the other sets of emoji draw."""

HELD_OUT_SHARE = 1 / 12
"""Of all other drawings: kept from the generator, too, as what its pictures are compared with."""


@dataclass(frozen=True)
class DrawingSet:
    """A set of drawings.

    Args:
        name: in its package.
        styles: the style's words for each ending of a drawing's name that is used; the ending "" is a name without one.
        endings: all endings that the set has, so that "" does not match names with another.
        is_coloured: whether drawings have colours of their own; others are given one, which their caption names.
        is_emoji: whether names are those of Unicode, whose keywords then belong to the caption.
    """

    name: str
    styles: Mapping[str, str]
    endings: tuple[str, ...] = field(default=())
    is_coloured: bool = True
    is_emoji: bool = False


def _emoji(name: str, style: str, is_coloured: bool = True) -> DrawingSet:
    return DrawingSet(name, {"": style}, is_coloured=is_coloured, is_emoji=True)


def _icons(name: str, style: str) -> DrawingSet:
    return DrawingSet(name, {"": style})


def _plain(name: str, style: str, ending: str = "", endings: tuple[str, ...] = ()) -> DrawingSet:
    return DrawingSet(name, {ending: style}, endings, is_coloured=False)


SETS = (
    _emoji("twemoji", "flat emoji"),
    _emoji("fluent-emoji-flat", "flat emoji"),
    _emoji("fluent-emoji", "glossy emoji"),
    _emoji("noto", "shaded emoji"),
    _emoji("noto-v1", "blob emoji"),
    _emoji("emojione", "round emoji"),
    _emoji("fxemoji", "simple emoji"),
    _emoji("streamline-emojis", "outlined emoji"),
    _icons("icon-park", "blue line icon"),
    DrawingSet("streamline-color", {"": "duotone icon", "flat": "flat duotone icon"}),
    DrawingSet("streamline-flex-color", {"": "flex icon", "flat": "flat flex icon"}),
    DrawingSet("streamline-plump-color", {"": "plump icon", "flat": "flat plump icon"}),
    DrawingSet("streamline-sharp-color", {"": "sharp icon", "flat": "flat sharp icon"}),
    _icons("streamline-freehand-color", "hand-drawn icon"),
    _icons("streamline-ultimate-color", "outlined flat icon"),
    _icons("streamline-cyber-color", "cyber icon"),
    DrawingSet("streamline-kameleon-color", {"": "flat round icon", "duo": "duotone round icon"}),
    DrawingSet("streamline-stickies-color", {"": "sticker", "duo": "duotone sticker"}),
    _icons("fluent-color", "gradient icon"),
    _icons("glyphs-poly", "low poly icon"),
    _icons("marketeq", "blue duotone icon"),
    DrawingSet("meteocons", {"": "weather line icon", "fill": "weather icon"}),
    _icons("flat-color-icons", "flat icon"),
    _icons("flat-ui", "flat icon"),
    _icons("circle-flags", "round flag"),
    _emoji("fluent-emoji-high-contrast", "solid emoji", is_coloured=False),
    _emoji("emojione-monotone", "solid round emoji", is_coloured=False),
    _plain("game-icons", "game icon"),
    _plain("pinhead", "map icon"),
    _plain("temaki", "map icon"),
    _plain("healthicons", "solid icon", endings=("24px", "outline", "outline-24px")),
    _plain("fa7-solid", "solid icon"),
    _plain("ph", "solid icon", "fill"),
    _plain("solar", "duotone icon", "bold-duotone"),
    _plain("icon-park-twotone", "two-tone icon"),
    _plain("mingcute", "solid icon", "fill"),
    DrawingSet("mdi", {"": "solid icon", "outline": "line icon"}, is_coloured=False),
    _plain("hugeicons", "line icon"),
    _plain("lucide", "line icon"),
    _plain("streamline-ultimate", "solid icon", "bold"),
)
CLIP_ART = "openclipart"
CLIP_ART_STYLE = "clip art"
RENDERED = "fluent-emoji-3d"
RENDERED_STYLE = "3d emoji"

OTHERS_NAMES = (
    "logo",
    "brand",
    "google",
    "microsoft",
    "facebook",
    "twitter",
    "instagram",
    "youtube",
    "github",
    "linkedin",
    "android",
    "windows",
    "adobe",
    "amazon",
)
"""Words of names of trade marks. Drawings with one are left out, as are whole sets of logos."""

COLOURS = {
    "black": "#1c1c1e",
    "grey": "#7a7f87",
    "white": "#ffffff",
    "red": "#e02f2f",
    "dark red": "#8c1620",
    "orange": "#f0802a",
    "yellow": "#f5c518",
    "green": "#2f9e44",
    "dark green": "#1f5c35",
    "teal": "#159a9c",
    "light blue": "#4aa8e8",
    "blue": "#1f6fd0",
    "dark blue": "#1b2f6b",
    "purple": "#7b3fc4",
    "pink": "#ec6fa9",
    "brown": "#7c4a2a",
}
BACKGROUNDS = {
    "white": "#ffffff",
    "pale yellow": "#fff6d6",
    "pale blue": "#dcecfb",
    "pale green": "#e0f4e2",
    "pale pink": "#fde4ec",
    "light grey": "#e8eaed",
    "dark blue": "#1b2f6b",
    "black": "#1c1c1e",
    "orange": "#f0802a",
    "yellow": "#f5c518",
    "green": "#2f9e44",
    "red": "#e02f2f",
}

CATEGORIES = (
    "cat",
    "dog",
    "fish",
    "bird",
    "car",
    "bus",
    "bicycle",
    "airplane",
    "house",
    "tree",
    "flower",
    "cake",
    "moon",
    "cloud",
    "heart",
    "clock",
    "book",
    "umbrella",
    "bell",
    "camera",
)
"""What drawings are recognised by in tests."""

CATEGORY_SHARE = 1 / 2
"""Of the drawings in one of the categories: kept from the generator."""
