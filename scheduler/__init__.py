"""Where requests, blocks and tensors meet: what each step computes, and what becomes of it."""
