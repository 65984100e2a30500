"""Means and weighted means of short runs of tokens: the summaries of a far field."""
