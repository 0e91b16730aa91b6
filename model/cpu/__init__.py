"""The CPU backend in C: the whole forward pass over the paged cache, one call a step."""
