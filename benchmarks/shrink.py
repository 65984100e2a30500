"""Strips of pictures at half their size, as JPEG files beside them: small enough to travel.

python benchmarks/shrink.py FOLDER
"""

import sys
from pathlib import Path

from PIL import Image

from nearfield._files import replace_file


def shrunk(strip: Path) -> None:
    with Image.open(strip) as image:
        half = image.convert("RGB").resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS)
    replace_file(strip.with_suffix(".jpg"), lambda part: half.save(part, format="JPEG", quality=90))


if __name__ == "__main__":
    for strip in sorted(Path(sys.argv[1]).glob("*.png")):
        if not strip.with_suffix(".jpg").exists():
            shrunk(strip)
