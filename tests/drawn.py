"""A few packages of drawings, made here, and what is made of them: as small as their readers allow."""

import json
from pathlib import Path
from typing import Any

from nearfield_lab.drawings.captions import Drawing
from nearfield_lab.drawings.model import DrawingConfig
from nearfield_lab.drawings.sets import SETS

CONFIG = DrawingConfig(
    joint_blocks=1,
    single_blocks=1,
    heads=2,
    head_dim=16,
    condition_tokens=16,
    condition_dim=16,
    size=32,
    vocabulary=80,
    text_blocks=1,
    text_heads=2,
)

DISC = '<circle cx="8" cy="8" r="8" fill="#e02f2f"/>'
SQUARE = '<path fill="currentColor" d="M0 0h16v16H0z"/>'


def drawing(name: str = "disc", body: str = DISC, **fields: Any) -> Drawing:
    known: dict[str, Any] = {"set": "flat-ui", "number": 0, "style": "flat icon", "box": (0, 0, 16, 16)}
    return Drawing(**known | {"name": name, "body": body} | fields)


def collection(number: int = 24) -> list[Drawing]:
    """Discs and squares in colours that their captions name."""
    shapes, colours = (("disc", DISC), ("square", SQUARE)), ("red", "blue", "green")
    return [
        drawing(
            f"{shapes[place % 2][0]}",
            shapes[place % 2][1],
            set="mdi",
            number=place,
            colour=colours[place % 3],
            keywords=("shape", "simple"),
        )
        for place in range(number)
    ]


def write_packages(folder: Path, licence: str = "MIT") -> Path:
    """Every package, each set with an icon of its own, and some with more."""
    icons = {one.name: {"plain": DISC} for one in SETS}
    icons["noto"] = {
        **{"cat": DISC, "hand": DISC, "flag-norway": DISC},
        **{f"hand-{tone}-skin-tone": DISC for tone in ("light", "medium", "dark")},
    }
    icons["fxemoji"] = {"sunwithface": DISC, "lowerrightwhitecircle": DISC}
    icons["streamline-color"] = {"big-ship-2": DISC, "big-ship-2-flat": SQUARE}
    icons["ph"] = {"boat": SQUARE, "boat-fill": SQUARE, "boat-thin": SQUARE, "github-logo-fill": SQUARE}
    icons["fluent-color"] = {"home-16": DISC, "home-48": SQUARE, "book-20": DISC}
    icons["circle-flags"] = {"no": DISC, "lang-no": DISC}
    for one in SETS:
        _write(
            folder / "iconify-json" / "package" / "json" / f"{one.name}.json",
            {
                "info": {
                    "name": one.name.title(),
                    "author": {"name": "A. Painter"},
                    "license": {"spdx": licence, "url": "https://example.org/licence"},
                },
                "icons": {name: {"body": body} for name, body in icons[one.name].items()},
                "categories": {"NatureEcology": ["cat", "big-ship-2"]},
                "chars": {"1f408": "cat"} if one.name == "noto" else {},
            },
        )
    _write(folder / "iconify-json" / "package" / "package.json", {"version": "1.2.3"})
    emoji = folder / "emojibase-data" / "package"
    _write(emoji / "package.json", {"version": "4.5.6"})
    groups = [{"order": 3, "message": "animals & nature"}, {"order": 9, "message": "flags"}]
    _write(
        emoji / "en" / "messages.json", {"groups": groups, "subgroups": [{"order": 34, "message": "cats"}]}
    )
    _write(
        emoji / "en" / "data.json",
        [
            {"label": "cat", "hexcode": "1F408", "tags": ["pet", "kitten"], "group": 3, "subgroup": 34},
            {"label": "sun with face", "hexcode": "1F31E", "tags": ["bright"], "group": 3, "subgroup": 34},
            {"label": "flag: Norway", "hexcode": "1F1F3-1F1F4", "tags": ["NO"], "group": 9, "subgroup": 34},
        ],
    )
    rendered = folder / "lobehub-fluent-emoji-3d" / "package"
    _write(rendered / "package.json", {"version": "7.8.9"})
    (rendered / "assets").mkdir()
    for code in ("1f408", "1f44b-1f3fb"):
        (rendered / "assets" / f"{code}.webp").write_bytes(b"not looked into")
    _write_clip_art(folder / "openclipart" / "usr" / "share" / "openclipart" / "svg")
    return folder


def _write_clip_art(folder: Path) -> None:
    spaces = (
        'xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/"'
        ' xmlns:cc="http://web.resource.org/cc/" xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"'
        ' xmlns:inkscape="http://www.inkscape.org/namespaces/inkscape"'
    )
    about = (
        "<metadata><rdf:RDF><cc:Work><dc:title>{title}</dc:title><dc:subject><rdf:Bag><rdf:li>Fruit</rdf:li>"
        "<rdf:li>Jane Doe</rdf:li></rdf:Bag></dc:subject><dc:creator><cc:Agent><dc:title>Jane Doe</dc:title>"
        '</cc:Agent></dc:creator><cc:license rdf:resource="http://web.resource.org/cc/{licence}"/></cc:Work>'
        "</rdf:RDF></metadata>"
    )
    # A page of 100, and a drawing beside it.
    drawn = '<circle inkscape:label="left over" id="unused" cx="150.12345" cy="50" r="20" fill="#e02f2f"/>'
    for path, title, licence in (
        ("food/fruit/apple_jane_d_01.svg", "Green Apple", "PublicDomain"),
        ("food/fruit/pear_jane_do_01.svg", "various cliparts", "PublicDomain"),
        ("food/fruit/plum.svg", "plum", "Attribution"),
        ("logos/pear.svg", "pear", "PublicDomain"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        body = drawn.replace("r=", f'data-name="{title}" r=')
        text = about.format(title=title, licence=licence) + body
        (folder / path).write_text(
            f'<svg {spaces} width="100px" height="100px">{text}</svg>', encoding="utf-8"
        )


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
