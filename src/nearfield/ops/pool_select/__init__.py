"""Pooled levels, and choosing blocks from coarse to fine."""
