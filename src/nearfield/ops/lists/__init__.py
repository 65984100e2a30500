"""Lists of plans: made from masks, transposed, ordered, packed, as boxes and as runs; and how they cross operators."""
