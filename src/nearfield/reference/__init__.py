"""Plain torch, dense, safe in float64: the specification the kernels are held to."""
