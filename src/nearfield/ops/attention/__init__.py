"""Attention over plans: the operation that all methods share."""
