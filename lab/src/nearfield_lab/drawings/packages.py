"""Drawings out of the packages that hold them: sets of icons and emoji, and clip art.

`fetch` names the packages; ordinary clients bring them. Nothing else is read from a network.
"""

import base64
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfield._files import read_json
from nearfield_lab.drawings.captions import Box, Drawing, chance, colours_for, toned, words_of
from nearfield_lab.drawings.pixels import drawn_box
from nearfield_lab.drawings.sets import (
    CLIP_ART,
    CLIP_ART_STYLE,
    OPEN_LICENCES,
    OTHERS_NAMES,
    RENDERED,
    RENDERED_STYLE,
    SETS,
    DrawingSet,
)
from nearfield_lab.storage import BadFile

FETCH = """\
npm pack @iconify/json @lobehub/fluent-emoji-3d emojibase-data
for name in iconify-json lobehub-fluent-emoji-3d emojibase-data; do
  mkdir -p $name && tar -xzf $name-*.tgz -C $name
done
apt-get download openclipart-svg && dpkg-deb -x openclipart-svg_*.deb openclipart
"""
"""Shell commands that make a folder of packages."""

MOST_BYTES = 24_000
"""Of one drawing's source: larger ones are few, slow, and mostly traced photographs."""

_LONG_NUMBER = re.compile(r"\d*\.\d{3,}(?![\d.]*e)")
_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_FOREIGN = re.compile(r"^\{(?!http://www\.w3\.org/)")
_LEFT_OUT = {
    *(
        "logos",
        "special",
        "duplicates",
        "icons",
    ),  # others' marks, textures, copies, and what icons are better at
    *("cardbacks", "ornamental", "simple", "bordered"),  # hundreds that differ in a number
}
_NO_KEYWORDS = {"hash", "unsorted"}
_MOST_ALIKE = 8  # drawings of clip art with one name
_GENERIC = {
    "clipart",
    "cliparts",
    "openclipart",
    "various",
    "symbols",
    "signs",
    "untitled",
    "drawing",
    "elements",
}
_FLAGS = 9  # the group of emoji
_SIZE = re.compile(r"-\d+$")


@dataclass(frozen=True)
class Source:
    """Where a set of drawings comes from, as the model card names it."""

    set: str
    title: str
    authors: str
    licence: str
    url: str
    package: str


Found = tuple[Source, list[Drawing]]


def read_packages(folder: Path) -> Iterator[Found]:
    """Every set with its drawings, in the order of `SETS`."""
    emoji = _Emoji(folder / "emojibase-data" / "package")
    for wanted in SETS:
        yield _icon_set(folder / "iconify-json" / "package", wanted, emoji)
    yield _rendered(folder / "lobehub-fluent-emoji-3d" / "package", emoji)
    yield _clip_art(folder / "openclipart" / "usr" / "share" / "openclipart" / "svg")


# -- sets of icons -------------------------------------------------------------------------------------------------


def _icon_set(package: Path, wanted: DrawingSet, emoji: "_Emoji") -> Found:
    document = _json(package / "json" / f"{wanted.name}.json")
    about = document["info"]
    licence = about["license"].get("spdx", "")
    if licence not in OPEN_LICENCES:
        raise BadFile(f"the set {wanted.name} is under {licence or 'no licence'}, which is not open enough")
    url = about["license"].get("url") or about["author"].get("url", "")
    version = _json(package / "package.json")["version"]
    source = Source(
        wanted.name, about["name"], about["author"]["name"], licence, url, f"npm @iconify/json {version}"
    )
    categories = _categories(document)
    codes = {name: code for code, name in document.get("chars", {}).items()}
    drawings = list[Drawing]()
    names = document["icons"]
    for name, style in _wanted(names, wanted, emoji):
        icon = names[name]
        if icon.get("hidden"):
            continue
        words, keywords = _words(name, wanted, emoji, codes)
        body = _short(icon["body"])
        box = _box(icon, document)
        if not _is_usable(words, body):
            continue
        colour, background = colours_for(wanted.name, name, wanted.is_coloured)
        keywords = [word for word in (*keywords, *categories.get(name, ())) if word and word != words]
        number = len(drawings)
        drawings.append(
            Drawing(
                wanted.name,
                number,
                words,
                style,
                body,
                box,
                tuple(dict.fromkeys(keywords)),
                colour,
                background,
            )
        )
    return source, drawings


def _wanted(names: dict[str, Any], wanted: DrawingSet, emoji: "_Emoji") -> Iterator[tuple[str, str]]:
    """The names of a set that are used, with their styles."""
    endings = sorted({*wanted.endings, *wanted.styles} - {""}, key=len, reverse=True)
    for name in names:
        ending = next((end for end in endings if name.endswith(f"-{end}")), "")
        if ending not in wanted.styles:
            continue
        if wanted.is_emoji and not emoji.is_chosen(name, names):
            continue
        if wanted.name == "fluent-color" and not name.endswith(_largest(name, names)):
            continue
        yield name, wanted.styles[ending]


def _largest(name: str, names: dict[str, Any]) -> str:
    """The largest of the sizes in which a set has a drawing, as its name ends."""
    start = _SIZE.sub("", name)
    return next((f"-{size}" for size in (48, 32, 28, 24, 20, 16) if f"{start}-{size}" in names), "")


def _words(name: str, wanted: DrawingSet, emoji: "_Emoji", codes: dict[str, str]) -> tuple[str, list[str]]:
    """What a drawing shows, and keywords."""
    if wanted.is_emoji:
        return emoji.words(name, codes.get(name, ""))
    for ending in sorted(wanted.styles, key=len, reverse=True):
        if ending:
            name = name.removesuffix(f"-{ending}")
    if wanted.name == "fluent-color":
        name = _SIZE.sub("", name)
    if wanted.name == "circle-flags":
        return emoji.flag(name), ["flag"]
    return words_of(name), []


def _categories(document: dict[str, Any]) -> dict[str, list[str]]:
    """The categories of each name, in words."""
    found = dict[str, list[str]]()
    for category, names in document.get("categories", {}).items():
        words = _plain_words(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", category))
        for name in names:
            found.setdefault(name, []).append(words)
    return found


def _plain_words(text: str) -> str:
    return re.sub(r"[^a-z]+", " ", text.lower().replace("&", "and")).strip()


def _box(icon: dict[str, Any], document: dict[str, Any]) -> Box:
    both = {"left": 0, "top": 0, "width": 16, "height": 16}
    both |= {key: document[key] for key in both if key in document}
    both |= {key: icon[key] for key in both if key in icon}
    return both["left"], both["top"], both["width"], both["height"]


def _is_usable(words: str, body: str) -> bool:
    if not words or len(body) > MOST_BYTES or "<text" in body:
        return False
    return not any(name in words for name in OTHERS_NAMES)


def _short(body: str) -> str:
    """A drawing's source with two digits behind the point where there were more: a fiftieth of a percent."""
    return _LONG_NUMBER.sub(lambda found: _rounded(found[0]), body)


def _rounded(number: str) -> str:
    value = float(number)
    if value < 0.1:  # scales in matrices, where digits in front say little
        return f"{value:.3g}" if value >= 1e-4 else number
    return f"{value:.2f}".rstrip("0").rstrip(".")


# -- emoji ---------------------------------------------------------------------------------------------------------


class _Emoji:
    """Names and keywords of Unicode's emoji."""

    def __init__(self, package: Path) -> None:
        groups = _json(package / "en" / "messages.json")
        self._groups = {group["order"]: _plain_words(group["message"]) for group in groups["groups"]}
        self._parts = {group["order"]: _plain_words(group["message"]) for group in groups["subgroups"]}
        self._by_code, self._by_name = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        for entry in _json(package / "en" / "data.json"):
            self._by_code[_bare(entry["hexcode"])] = entry
            self._by_name[_slug(entry["label"])] = entry
            self._by_name[_slug(entry["label"]).replace("-", "")] = entry

    def is_chosen(self, name: str, names: dict[str, Any]) -> bool:
        """Of people with several skin tones, two are used: the one without a tone, and one of the others.

        Names whose words are run together are used where they are those of Unicode.
        """
        if "-" not in name and len(name) > 8 and name not in self._by_name:
            return False
        base, tone = toned(name)
        if not tone or (base not in names and "skin" not in name):
            return True
        first, _ = toned(base)
        return first == base and tone == _tone_for(base)

    def words(self, name: str, code: str) -> tuple[str, list[str]]:
        base, tone = toned(name)
        entry = self._by_code.get(_bare(code)) or self._by_name.get(base) or self._by_name.get(name)
        if entry is None:
            return words_of(name), []
        words = entry["label"].lower().removeprefix("flag: ") if not tone else words_of(base)
        words = re.sub(r"[“”\"():,]", "", words).replace("-", " ")
        if tone:
            words += f" with {tone} skin tone"
        if entry.get("group") == _FLAGS:
            words = f"flag of {words}"
        parts = (self._parts.get(entry.get("subgroup")), self._groups.get(entry.get("group")))
        return words, [*(tag.lower() for tag in entry.get("tags", ())), *(part for part in parts if part)]

    def entry_words(self, code: str) -> tuple[str, list[str]] | None:
        entry = self._by_code.get(_bare(code))
        return None if entry is None else self.words(_slug(entry["label"]), code)

    def flag(self, letters: str) -> str:
        """Words for the flag of a country by its two letters; none for what is no country."""
        if len(letters) != 2:
            return ""
        code = "-".join(f"{0x1F1E6 + ord(letter) - ord('a'):X}" for letter in letters)
        entry = self._by_code.get(code)
        return "" if entry is None else self.words("", entry["hexcode"])[0]


def _tone_for(base: str) -> str:
    tones = ("light", "medium light", "medium", "medium dark", "dark")
    return tones[int(chance(base, "tone") * len(tones))]


def _bare(code: str) -> str:
    return code.upper().replace("-FE0F", "").replace("-200D", "")


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("’", "")).strip("-")


def _rendered(package: Path, emoji: _Emoji) -> Found:
    """Shaded emoji as pictures of 256 pixels, put into an SVG each, so that all drawings are read in one way."""
    version = _json(package / "package.json")["version"]
    source = Source(
        RENDERED,
        "Fluent Emoji 3D",
        "Microsoft Corporation, LobeHub",
        "MIT",
        "https://github.com/lobehub/fluent-emoji",
        f"npm @lobehub/fluent-emoji-3d {version}",
    )
    drawings = list[Drawing]()
    for path in sorted((package / "assets").glob("*.webp")):
        found = emoji.entry_words(path.stem)
        if found is None:  # of emoji with a skin tone
            continue
        words, keywords = found
        data = base64.b64encode(path.read_bytes()).decode()
        body = f'<image width="256" height="256" href="data:image/webp;base64,{data}"/>'
        _, background = colours_for(RENDERED, words, is_coloured=True)
        number = len(drawings)
        drawings.append(
            Drawing(
                RENDERED,
                number,
                words,
                RENDERED_STYLE,
                body,
                (0, 0, 256, 256),
                tuple(keywords),
                "",
                background,
            )
        )
    return source, drawings


# -- clip art ------------------------------------------------------------------------------------------------------


def _clip_art(folder: Path) -> Found:
    source = Source(
        CLIP_ART,
        "Open Clip Art Library 0.18",
        "the contributors of openclipart.org",
        "public domain",
        "https://openclipart.org",
        "Debian openclipart-svg",
    )
    drawings = list[Drawing]()
    seen, names = set[str](), Counter[str]()
    for path in sorted(folder.rglob("*.svg")):
        parts = path.relative_to(folder).parts[:-1]
        if not _is_drawn(parts):
            continue
        try:
            root = ElementTree.fromstring(path.read_bytes())
        except ElementTree.ParseError:
            continue
        if not _is_public(root):
            continue
        words, keywords = _clip_words(root, path.stem)
        page = _page(root)
        body = None if page is None else _clip_body(root)
        if page is None or body is None or body in seen or not _is_usable(words, body):
            continue
        seen.add(body)
        names[words] += 1
        if names[words] > _MOST_ALIKE:
            continue
        box = drawn_box(body, page)
        if box is None or not _is_compact(box):
            continue
        # Folders go from the general to the special; keywords go the other way.
        keywords = [*keywords, *(words_of(part) for part in reversed(parts))]
        _, background = colours_for(CLIP_ART, f"{path.stem}", is_coloured=True)
        known = {"", words, *_NO_KEYWORDS}
        kept = tuple(dict.fromkeys(word for word in keywords if word not in known))
        number = len(drawings)
        drawings.append(Drawing(CLIP_ART, number, words, CLIP_ART_STYLE, body, box, kept, "", background))
    return source, drawings


def _is_drawn(parts: Sequence[str]) -> bool:
    return not _LEFT_OUT & set(parts)


def _is_public(root: ElementTree.Element) -> bool:
    licences = [
        value.lower()
        for element in root.iter()
        for name, value in element.items()
        if name.endswith("}resource")
    ]
    return any("publicdomain" in value for value in licences)


def _clip_words(root: ElementTree.Element, stem: str) -> tuple[str, list[str]]:
    """Title and keywords, without the names of authors, which stand among both."""
    texts = {"title": list[str](), "li": list[str](), "creator": list[str]()}
    for element in root.iter():
        kind = _local(element.tag)
        if kind == "Agent":
            texts["creator"] += [child.text or "" for child in element]
        elif kind == "li" and element.text:
            texts["li"].append(element.text)
        elif kind == "Work":
            texts["title"] += [child.text or "" for child in element if _local(child.tag) == "title"]
    authors = {
        part for name in texts["creator"] for part in re.split(r"[^a-z]+", name.lower()) if len(part) > 2
    }
    titles = [*texts["title"], re.sub(r"_\d+$", "", stem)]
    parted = [words_of(re.sub(r"[^A-Za-z]+", " ", title)).split() for title in titles]
    # Names of files have those of authors, cut off somewhere.
    named = [
        [word for word in words if len(word) > 1 and not any(author.startswith(word) for author in authors)]
        for words in parted
    ]
    words = next((words for words in named if words and not _GENERIC & set(words)), [])
    keywords = [
        words_of(re.sub(r"[^A-Za-z0-9]+", " ", text))
        for text in texts["li"]
        if not authors & set(re.split(r"[^a-z]+", text.lower()))
    ]
    return " ".join(words[:8]), [word for word in keywords if 2 < len(word) < 24]


def _page(root: ElementTree.Element) -> Box | None:
    try:
        if "viewBox" in root.attrib:
            left, top, width, height = map(float, re.split(r"[\s,]+", root.attrib["viewBox"].strip()))
        else:
            left, top = 0.0, 0.0
            width, height = (
                float(re.sub(r"(px|pt)$", "", root.attrib[name])) for name in ("width", "height")
            )
    except (KeyError, ValueError):
        return None
    return (left, top, width, height) if width > 0 and height > 0 else None


def _is_compact(box: Box) -> bool:
    return 0.25 < box[2] / box[3] < 4


def _clip_body(root: ElementTree.Element) -> str | None:
    """The source of what is drawn, without what editors left there; None where a picture or a text is part of it."""
    _strip(root)
    if any(_local(element.tag) in ("image", "text", "flowRoot", "foreignObject") for element in root.iter()):
        return None
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    styles = ("style", "fill", "stroke", "fill-rule")
    kept: dict[str, str] = {name: root.attrib[name] for name in styles if name in root.attrib}
    inner = ElementTree.Element(f"{{{_SVG}}}g", kept)
    inner.extend(list(root))
    text = ElementTree.tostring(inner, encoding="unicode")
    text = text.replace(f' xmlns="{_SVG}"', "")
    return _short(re.sub(r"\s+", " ", text).replace("> <", "><"))


def _strip(root: ElementTree.Element) -> None:
    used = set(re.findall(r"#([\w.:-]+)", " ".join(v for e in root.iter() for v in e.attrib.values())))
    for parent in list(root.iter()):
        for child in list(parent):
            if _FOREIGN.match(str(child.tag)) or _local(child.tag) in ("metadata", "title", "desc"):
                parent.remove(child)
        for name in list(parent.attrib):
            is_unused = name == "id" and parent.attrib[name] not in used
            if _FOREIGN.match(name) or is_unused or name.endswith("}space"):
                del parent.attrib[name]


def _local(tag: Any) -> str:
    return str(tag).rpartition("}")[2]


def _json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a folder of packages is made so:\n{FETCH}")
    return read_json(path)
