"""The embedded model: a small FLUX that runs the main job on a laptop."""
