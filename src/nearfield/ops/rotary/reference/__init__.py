"""The specification: plain torch, right in float64."""
