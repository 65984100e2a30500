"""Drawings: from packages to captions, files and pixels."""

import io
import lzma
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.drawn import DISC, SQUARE, collection, drawing, write_packages

from nearfield_lab.drawings import packed
from nearfield_lab.drawings.captions import VARIANTS, Drawing, captions, colours_for, toned, words_of
from nearfield_lab.drawings.packages import Found, Source, read_packages
from nearfield_lab.drawings.pixels import drawn_box, picture_of, rendered, write_archive
from nearfield_lab.drawings.sets import BACKGROUNDS, CATEGORIES, COLOURS, HELD_OUT, SETS
from nearfield_lab.storage import BadFile

HAS_RESVG = pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('resvg_py')", reason="needs resvg-py"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    pytest.importorskip("resvg_py")
    folder = write_packages(tmp_path_factory.mktemp("packages"))
    return {source.set: (source, drawings) for source, drawings in read_packages(folder)}


def names(found: dict[str, Found], name: str) -> list[str]:
    return [one.name for one in found[name][1]]


# -- captions ------------------------------------------------------------------------------------------------------


def test_captions_name_style_and_colours() -> None:
    one = drawing("sail boat", SQUARE, colour="teal", background="white", keywords=("sea", "wind"))
    assert captions(one) == (
        "sail boat, flat icon, teal on white",
        "a sail boat, teal on white",
        "flat icon of sail boat, teal on white",
        "sail boat, sea, wind, flat icon, teal on white",
    )
    assert captions(drawing("apple"))[:2] == ("apple, flat icon", "an apple")
    assert captions(drawing("apple", background="pale blue"))[0] == "apple, flat icon, on pale blue"


def test_every_drawing_has_the_same_number_of_captions() -> None:
    assert {len(captions(one)) for one in collection()} == {VARIANTS}


def test_words_of_names() -> None:
    assert words_of("big-ship-2") == "big ship"
    assert words_of("Cat_with-wry--smile") == "cat with wry smile"
    assert words_of("2") == "2"


def test_skin_tones_are_told_from_names() -> None:
    assert toned("hand-medium-dark-skin-tone") == ("hand", "medium dark")
    assert toned("judge-light") == ("judge", "light")
    assert toned("hand") == ("hand", "")


def test_a_drawing_never_has_the_colour_of_its_background() -> None:
    for number in range(500):
        colour, background = colours_for("mdi", str(number), is_coloured=False)
        assert COLOURS[colour] != BACKGROUNDS[background]
    assert {colours_for("noto", str(number), is_coloured=True)[0] for number in range(50)} == {""}


# -- packages ------------------------------------------------------------------------------------------------------


def test_every_set_is_read_with_its_licence(found: dict[str, Found]) -> None:
    assert set(found) == {*(one.name for one in SETS), "fluent-emoji-3d", "openclipart"}
    source = found["mdi"][0]
    assert source == Source(
        "mdi", "Mdi", "A. Painter", "MIT", "https://example.org/licence", "npm @iconify/json 1.2.3"
    )


def test_a_closed_licence_is_refused(tmp_path: Path) -> None:
    folder = write_packages(tmp_path, licence="CC-BY-NC-4.0")
    with pytest.raises(BadFile, match=r"twemoji is under CC-BY-NC-4\.0"):
        list(read_packages(folder))


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="npm pack @iconify/json"):
        list(read_packages(tmp_path))


def test_emoji_have_the_names_and_keywords_of_unicode(found: dict[str, Found]) -> None:
    cat = next(one for one in found["noto"][1] if one.name == "cat")
    assert cat.keywords == ("pet", "kitten", "cats", "animals and nature", "nature ecology")
    assert "flag of norway" in names(found, "noto")
    assert names(found, "circle-flags") == ["flag of norway"]


def test_one_skin_tone_of_several_is_used(found: dict[str, Found]) -> None:
    hands = [name for name in names(found, "noto") if name.startswith("hand")]
    assert "hand" in hands
    assert len(hands) <= 2
    assert all(name == "hand" or name.endswith(" skin tone") for name in hands)


def test_names_run_together_are_those_of_unicode_or_left_out(found: dict[str, Found]) -> None:
    assert names(found, "fxemoji") == ["sun with face"]


def test_endings_choose_styles(found: dict[str, Found]) -> None:
    ships = [(one.name, one.style) for one in found["streamline-color"][1]]
    assert ships == [("big ship", "duotone icon"), ("big ship", "flat duotone icon")]
    assert [(one.name, one.style) for one in found["ph"][1]] == [("boat", "solid icon")]


def test_of_several_sizes_the_largest_is_used(found: dict[str, Found]) -> None:
    assert [(one.name, one.body) for one in found["fluent-color"][1]] == [("home", SQUARE), ("book", DISC)]


def test_rendered_emoji_without_skin_tone_are_used(found: dict[str, Found]) -> None:
    assert names(found, "fluent-emoji-3d") == ["cat"]


def test_clip_art_is_named_without_its_author(found: dict[str, Found]) -> None:
    drawings = found["openclipart"][1]
    assert [(one.name, one.keywords) for one in drawings] == [
        ("green apple", ("fruit", "food")),
        ("pear", ("fruit", "food")),
    ]


def test_clip_art_is_found_beside_its_page(found: dict[str, Found]) -> None:
    one = found["openclipart"][1][0]
    assert "Doe" not in one.body
    assert "unused" not in one.body
    assert "inkscape" not in one.body
    left, top, width, height = one.box
    assert (left + width / 2, top + height / 2) == pytest.approx((150, 50), abs=1)
    assert (width, height) == pytest.approx((40, 40), abs=1.5)


# -- files ---------------------------------------------------------------------------------------------------------


def test_parts_hold_every_drawing(found: dict[str, Found], tmp_path: Path) -> None:
    parts = packed.write_parts(tmp_path, list(found.values()), most_bytes=2000)
    assert len(parts) > 2
    assert max(path.stat().st_size for path in parts) <= 2000
    assert packed.read_parts(tmp_path) == [one for _, drawings in found.values() for one in drawings]


def test_a_cut_part_is_refused(found: dict[str, Found], tmp_path: Path) -> None:
    (part,) = packed.write_parts(tmp_path, list(found.values()), most_bytes=2**20)
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises((BadFile, lzma.LZMAError), match=r"no whole file|ended before"):
        packed.read_parts(tmp_path)


def test_a_missing_part_is_named(found: dict[str, Found], tmp_path: Path) -> None:
    (part,) = packed.write_parts(tmp_path, list(found.values()), most_bytes=2**20)
    part.unlink()
    with pytest.raises(FileNotFoundError, match=r"drawings-0\.xz does not exist"):
        packed.read_parts(tmp_path)


def test_one_set_is_held_out_whole_and_a_share_of_the_others() -> None:
    numbers = range(2000)
    assert all(packed.is_held_out(drawing(set=HELD_OUT, number=number)) for number in numbers)
    others = sum(packed.is_held_out(drawing(number=number)) for number in numbers) / 2000
    cats = sum(packed.is_held_out(drawing("cat", number=number)) for number in numbers) / 2000
    assert others == pytest.approx(1 / 12, abs=0.02)
    assert cats == pytest.approx(1 / 2, abs=0.04)


def test_categories_are_told_by_one_word() -> None:
    assert packed.category_of(drawing("black cat")) == "cat"
    assert packed.category_of(drawing("cat dog")) is None
    assert packed.category_of(drawing("cat with wry smile")) is None
    assert len(set(CATEGORIES)) == 20


def test_pictures_are_compared_with_held_out_drawings_of_known_styles() -> None:
    drawings = [drawing(number=number) for number in range(300)] + [drawing(set=HELD_OUT)]
    chosen = packed.compared_with(drawings, 10)
    assert len(chosen) == 10
    assert all(packed.is_held_out(one) and one.set != HELD_OUT for one in chosen)
    assert packed.compared_with(drawings[::-1], 10) == chosen


def test_the_table_names_every_set(found: dict[str, Found], tmp_path: Path) -> None:
    packed.write_parts(tmp_path, list(found.values()), most_bytes=2**20)
    table = packed.licence_table(packed.read_index(tmp_path)["sets"])
    assert table.count("\n") == 2 + len(found) + 1
    assert (
        "| Mdi (`mdi`) | 1 | 0 | A. Painter | [MIT](https://example.org/licence) | npm @iconify/json 1.2.3 |"
        in table
    )


# -- pixels --------------------------------------------------------------------------------------------------------


def colour_at(picture: torch.Tensor, row: int, column: int) -> str:
    return "#" + "".join(f"{value:02x}" for value in picture[:, row, column].tolist())


@HAS_RESVG
def test_a_drawing_stands_in_the_middle_of_its_background() -> None:
    picture = picture_of(drawing(body=SQUARE, colour="blue", background="pale yellow"), 64)
    assert picture.shape == (3, 64, 64)
    assert colour_at(picture, 32, 32) == COLOURS["blue"]
    assert {colour_at(picture, row, 0) for row in (0, 63)} == {BACKGROUNDS["pale yellow"]}


@HAS_RESVG
def test_what_cannot_be_rendered_is_left_out() -> None:
    drawings = [drawing(), drawing(body="<path d='"), drawing(body=SQUARE)]
    ((numbers, pictures),) = rendered(drawings, 16, workers=1)
    assert numbers == [0, 2]
    assert torch.equal(pictures[0], picture_of(drawings[0], 16))
    with pytest.raises(BadFile, match="drawing 0 of flat-ui cannot be rendered"):
        picture_of(drawings[1], 16)


@HAS_RESVG
def test_all_pictures_come_some_together() -> None:
    drawings = collection(7)
    batches = list(rendered(drawings, 16, workers=1, together=3))
    assert [numbers for numbers, _ in batches] == [[0, 1, 2], [3, 4, 5], [6]]


@HAS_RESVG
def test_nothing_has_no_box() -> None:
    assert drawn_box("<g/>", (0, 0, 10, 10)) is None


def test_archives_hold_numbered_pictures(tmp_path: Path) -> None:
    images = torch.full((3, 16, 16, 3), 200, dtype=torch.uint8)
    write_archive(tmp_path / "some.tar", [images[:2], images[2:]])
    with tarfile.open(tmp_path / "some.tar") as archive:
        assert archive.getnames() == ["000000.webp", "000001.webp", "000002.webp"]
        content = archive.extractfile("000002.webp")
        assert content is not None
        with Image.open(io.BytesIO(content.read())) as image:
            assert image.size == (16, 16)
            assert image.getpixel((8, 8)) == pytest.approx((200, 200, 200), abs=2)


def test_documents_return_drawings() -> None:
    one = drawing(keywords=("round",), colour="teal")
    assert Drawing.of(one.document()) == one
