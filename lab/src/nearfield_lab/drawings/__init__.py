"""Drawings with captions: their packages, captions and pixels, and the model that learns to draw from a caption."""
