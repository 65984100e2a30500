"""Lists of plans, made on the device: from masks, transposed, ordered, packed."""
