"""Make the pictures of the documentation, and the page of what works where: `python docs/build.py`.

Everything is drawn from the library itself, so a picture cannot show a pattern that the code does not compute.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab" / "src")]

import command_tables  # noqa: E402
import plan_pictures  # noqa: E402
import support  # noqa: E402

from nearfield import Geometry, Hilbert  # noqa: E402
from nearfield_lab.plots import show  # noqa: E402
from nearfield_lab.plots.bars import attend_bars, hilbert_bars, model_bars  # noqa: E402
from nearfield_lab.plots.lines import recall_lines, scaling_lines  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Tiles on a grid of odd sides, the methods, and bars or lines for committed results."""
    odd = show.examine(Geometry((45, 80), text=450), Hilbert(tiles=9, near="tile", far=None), layers=range(2))
    show.draw(IMAGES / "any-grid.png", odd)
    method = show.examine(Geometry((64, 64), text=512), Hilbert(tiles=16, near="tile"), layers=range(4))
    show.draw(IMAGES / "hilbert.png", method)
    around = show.examine(Geometry((64, 64), text=64), Hilbert(), layers=[0])
    show.draw(IMAGES / "around.png", around)
    plan_pictures.write(IMAGES)
    bars = {"attend": attend_bars, "hilbert": hilbert_bars, "model": model_bars}
    for benchmark, draw in bars.items():
        for path in sorted(RESULTS.glob(f"{benchmark}-*.json")):
            document = json.loads(path.read_text(encoding="utf-8"))
            gpus = document["machine"]["gpus"]
            name = gpus[0]["name"] if gpus else document["machine"]["cpu"]["name"]
            draw(IMAGES / f"{path.stem}.png", document["results"], name)
    for path in sorted(RESULTS.glob("recall-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        recall_lines(IMAGES / f"{path.stem}.png", document["results"], document["source"]["kind"])
    document = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))
    scaling_lines(IMAGES / "scaling.png", document["results"])
    support.write()
    command_tables.write()
    for picture in sorted(IMAGES.glob("*.png")):
        print(f"{picture.relative_to(ROOT)}  {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
