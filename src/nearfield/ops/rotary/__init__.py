"""Rotary positions: of queries and keys, and of keys that move."""
