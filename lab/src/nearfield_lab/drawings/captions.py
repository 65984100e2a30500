"""From what is known of a drawing to captions: its name, keywords, category, style and colours."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nearfield._files import BadFile, check_fields
from nearfield_lab.drawings.sets import BACKGROUNDS, COLOURS

Box = tuple[float, float, float, float]
"""Left, top, width and height."""

VARIANTS = 4
"""Captions of one drawing, from which each step of training takes one."""

_KEYWORDS = 4  # at most, in one caption
_LIGHT_ON_DARK = {"black", "dark blue", "green", "red", "orange"}
_TONE = re.compile(r"-(medium-dark|medium-light|dark|light|medium)(?:-skin-tone)?$")


@dataclass(frozen=True)
class Drawing:
    """A drawing and what is known of it.

    Args:
        set: the name of its set.
        number: among the drawings of its set.
        name: words, such as "cat with wry smile".
        body: what stands between the tags `<svg>`.
        box: where the drawing is.
        keywords: further words, the closest ones first.
        colour: a name of `COLOURS`, in which it is drawn; empty where it has its own.
        background: a name of `BACKGROUNDS`.
    """

    set: str
    number: int
    name: str
    style: str
    body: str
    box: Box
    keywords: tuple[str, ...] = field(default=())
    colour: str = ""
    background: str = "white"

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"box": list(self.box), "keywords": list(self.keywords)}

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Drawing":
        texts = dict.fromkeys(("set", "name", "style", "body", "colour", "background"), str)
        check_fields("a drawing", document, {**texts, "number": int, "box": list, "keywords": list})
        box, keywords = tuple(document["box"]), tuple(document["keywords"])
        if len(box) != 4 or not all(type(side) in (int, float) for side in box):
            raise BadFile(f"`box` in a drawing must be four numbers; got {document['box']}")
        if not all(isinstance(word, str) for word in keywords):
            raise BadFile("`keywords` in a drawing must be texts")
        if document["background"] not in BACKGROUNDS:
            raise BadFile(f"`background` in a drawing must be known; got {document['background']!r}")
        known = {name: document[name] for name in (*texts, "number")}
        return cls(**known, box=box, keywords=keywords)


def captions(drawing: Drawing) -> tuple[str, ...]:
    """Its captions, from short to long. The first one is what pictures are asked for by in tests."""
    colours = _colour_words(drawing)
    name, style = drawing.name, drawing.style
    start = chance(drawing.set, drawing.name, "keywords")
    keywords = _some(drawing.keywords, start)
    return (
        ", ".join([name, style, *colours]),
        ", ".join([with_article(name), *colours]),
        ", ".join([f"{style} of {name}", *colours]),
        ", ".join([name, *keywords, style, *colours]),
    )


def _colour_words(drawing: Drawing) -> list[str]:
    if drawing.colour:
        return [f"{drawing.colour} on {drawing.background}"]
    return [] if drawing.background == "white" else [f"on {drawing.background}"]


def _some(keywords: Sequence[str], start: float) -> list[str]:
    first = int(start * max(1, len(keywords) - _KEYWORDS + 1))
    return list(keywords[first : first + _KEYWORDS])


def with_article(name: str) -> str:
    if name.split(" ")[0].endswith("s") or not name[:1].isalpha():
        return name
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def words_of(name: str) -> str:
    """The name of a drawing in words: without dashes, and without the number of one of several alike."""
    words = re.sub(r"[-_\s]+", " ", name).strip().lower()
    return re.sub(r"(?<=[a-z]) \d{1,2}$", "", words)


def toned(name: str) -> tuple[str, str]:
    """The name of an emoji without its skin tone, and the tone, if it has one."""
    found = _TONE.search(name)
    return (name[: found.start()], found[1].replace("-", " ")) if found else (name, "")


def colours_for(set_name: str, name: str, is_coloured: bool) -> tuple[str, str]:
    """The colour and the background of a drawing, by chance that its name decides."""
    draw = chance(set_name, name, "background")
    places = list(BACKGROUNDS)
    if is_coloured:
        pale = places[1:6]
        return "", "white" if draw < 0.8 else pale[int(draw * 1e6) % len(pale)]
    background = "white" if draw < 0.5 else places[1 + int(draw * 1e6) % (len(places) - 1)]
    if background in _LIGHT_ON_DARK:
        return ("white", "yellow")[int(draw * 1e5) % 3 == 0], background
    dark = [colour for colour in COLOURS if colour not in ("white", background)]
    if background == "yellow":
        dark = ["black", "dark red", "dark blue", "dark green", "brown", "purple"]
    return dark[int(chance(set_name, name, "colour") * len(dark))], background


def chance(*words: str) -> float:
    """A number from 0 to 1 that the words decide."""
    digest = hashlib.sha256("\0".join(words).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
