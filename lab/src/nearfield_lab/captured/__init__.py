"""Captured activations: what attention is given in real models, and how far methods are from dense attention on it."""

from nearfield_lab.captured.rows import Read, Row, default_rows, row_of
from nearfield_lab.captured.samples import Sample, capture, latent_sample, read_samples
from nearfield_lab.captured.table import averaged, measured, tabulated

__all__ = [
    "Read",
    "Row",
    "Sample",
    "averaged",
    "capture",
    "default_rows",
    "latent_sample",
    "measured",
    "read_samples",
    "row_of",
    "tabulated",
]
