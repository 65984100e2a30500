"""Methods as newcomers write them, one file each. `tests/test_newcomers.py` drops them into a copy of the library."""
