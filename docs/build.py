"""Make what is drawn and computed for the documentation: `python docs/build.py`.

Pictures are drawn from the library itself, tables from the files in benchmarks/results, the page of commands from the
parsers, and the support matrix from what runs: so none of them can say anything that the code or the files do not.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab" / "src")]

import command_tables  # noqa: E402
import plan_pictures  # noqa: E402
import result_tables  # noqa: E402
import support  # noqa: E402

from nearfield import Geometry, Hilbert  # noqa: E402
from nearfield_lab.plots import show  # noqa: E402
from nearfield_lab.plots.lines import recall_lines  # noqa: E402

IMAGES = ROOT / "docs" / "images"


def main() -> None:
    """The method with tiles and around blocks, plans, lines of recall, and everything that is text."""
    tiles = show.examine(Geometry((64, 64), text=512), Hilbert(tiles=16, near="tile"), layers=range(4))
    show.draw(IMAGES / "hilbert.png", tiles)
    around = show.examine(Geometry((64, 64), text=64), Hilbert(), layers=[0])
    show.draw(IMAGES / "around.png", around)
    plan_pictures.write(IMAGES)
    recall = json.loads((result_tables.RESULTS / "recall-cats512.json").read_text(encoding="utf-8"))
    recall_lines(IMAGES / "recall-cats512.png", recall["results"], recall["source"]["kind"])
    result_tables.write()
    support.write()
    command_tables.write()
    for picture in sorted(IMAGES.glob("*.png")):
        print(f"{picture.relative_to(ROOT)}  {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
