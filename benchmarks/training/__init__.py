"""Training runs that compare optimizers: a small language model on bytes of text, and optimizers from other papers."""
