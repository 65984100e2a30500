"""nearfield-lab: the embedded model, training and tuning, picture quality, the studio, and plots, around nearfield."""

from pathlib import Path

from nearfield import __version__ as __version__
from nearfield import recipes

recipes.add_folder(Path(__file__).parent / "embedded" / "recipes")
