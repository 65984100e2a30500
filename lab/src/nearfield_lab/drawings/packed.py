"""Drawings in a few compressed files, small enough to be carried to the machine that trains.

Each file is a row of xz streams, so `xz -dc FILE | head` shows what is in it: JSON lines, one for each drawing.
"""

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nearfield._files import check_fields, parsed_json, read_json, replace_file, write_json
from nearfield_lab.drawings.captions import Drawing, chance
from nearfield_lab.drawings.packages import Found, Source
from nearfield_lab.drawings.sets import CATEGORIES, CATEGORY_SHARE, HELD_OUT, HELD_OUT_SHARE
from nearfield_lab.storage import BadFile

INDEX = "drawings.json"
_TOGETHER = 2000  # drawings compressed together


def write_parts(folder: Path, found: Sequence[Found], most_bytes: int) -> list[Path]:
    """Drawings in files of at most `most_bytes`, and an index with the sets and their licences."""
    parts, content = list[Path](), b""

    def close() -> None:
        nonlocal content
        path = folder / f"drawings-{len(parts)}.xz"
        whole = content
        replace_file(path, lambda part: part.write_bytes(whole))
        parts.append(path)
        content = b""

    for stream in _streams(found):
        if content and len(content) + len(stream) > most_bytes:
            close()
        content += stream
    close()
    index = {
        "format": 1,
        "parts": [path.name for path in parts],
        "sets": [asdict(source) | _counts(drawings) for source, drawings in found],
    }
    write_json(folder / INDEX, index)
    return parts


def _streams(found: Sequence[Found]) -> Iterator[bytes]:
    for _, drawings in found:
        for start in range(0, len(drawings), _TOGETHER):
            lines = [
                json.dumps(one.document(), ensure_ascii=False) for one in drawings[start : start + _TOGETHER]
            ]
            yield lzma.compress("".join(f"{line}\n" for line in lines).encode(), preset=9)


def _counts(drawings: Sequence[Drawing]) -> dict[str, Any]:
    held_out = sum(is_held_out(drawing) for drawing in drawings)
    return {"drawings": len(drawings), "held_out": held_out}


def read_parts(folder: Path) -> list[Drawing]:
    """All drawings of a folder, in the order in which they were written."""
    index = read_index(folder)
    drawings = list[Drawing]()
    for name in index["parts"]:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; {INDEX} names it")
        try:
            with lzma.open(path, "rt", encoding="utf-8") as lines:
                drawings += [Drawing.of(parsed_json(path, line)) for line in lines]
        except (lzma.LZMAError, EOFError, ValueError) as error:
            raise BadFile(f"{path} is no whole file of drawings: {error}") from None
    known = sum(one["drawings"] for one in index["sets"])
    if len(drawings) != known:
        raise BadFile(f"{folder} must hold the {known:,} drawings that {INDEX} counts; got {len(drawings):,}")
    return drawings


def read_index(folder: Path) -> Mapping[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `nearfield drawings pack` writes it")
    index: Mapping[str, Any] = read_json(path, {"format": int, "parts": list, "sets": list})
    if index["format"] != 1:
        raise BadFile(f"{path} has format {index['format']}; this version reads 1")
    if not all(isinstance(name, str) for name in index["parts"]):
        raise BadFile(f"`parts` in {path} must be names of files")
    texts = dict.fromkeys(Source.__dataclass_fields__, str)
    for one in index["sets"]:
        check_fields(f"a set in {path}", one, {**texts, "drawings": int, "held_out": int})
    return index


# -- what is kept from the generator -------------------------------------------------------------------------------


def is_held_out(drawing: Drawing) -> bool:
    """Whether no generator learns from a drawing: a set as a whole, and a share of the others."""
    if drawing.set == HELD_OUT:
        return True
    share = HELD_OUT_SHARE if category_of(drawing) is None else CATEGORY_SHARE
    return chance(drawing.set, str(drawing.number), "held out") < share


def category_of(drawing: Drawing) -> str | None:
    """The category of a drawing with a short name that has one category's word in it."""
    words = drawing.name.split()
    named = [word for word in words if word in CATEGORIES]
    return named[0] if len(named) == 1 and len(words) <= 2 else None


def compared_with(drawings: Sequence[Drawing], number: int) -> list[Drawing]:
    """Held-out drawings in styles that the generator knows, in an order by chance: what its pictures are compared with.

    Their first captions are what it is asked for.
    """
    known = [drawing for drawing in drawings if drawing.set != HELD_OUT and is_held_out(drawing)]
    return sorted(known, key=lambda one: chance(one.set, str(one.number), "compared"))[:number]


# -- licences ------------------------------------------------------------------------------------------------------


def licence_table(sets: Sequence[Mapping[str, Any]]) -> str:
    """The sets as a table for the model card."""
    rows = ["| set | drawings | kept for tests | by | licence | package |", "|---|---|---|---|---|---|"]
    for one in sets:
        source = Source(**{name: one[name] for name in Source.__dataclass_fields__})
        licence = f"[{source.licence}]({source.url})" if source.url else source.licence
        rows.append(
            f"| {source.title} (`{source.set}`) | {one['drawings']:,} | {one['held_out']:,} | {source.authors} |"
            f" {licence} | {source.package} |"
        )
    total, held_out = (sum(one[name] for one in sets) for name in ("drawings", "held_out"))
    rows.append(f"| all | {total:,} | {held_out:,} | | | |")
    return "\n".join(rows) + "\n"
