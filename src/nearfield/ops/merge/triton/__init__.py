"""Kernels in Triton; the specification is in `reference`."""
