"""Maps between all tokens and merged ones."""
