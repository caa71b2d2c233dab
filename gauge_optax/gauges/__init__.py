"""One kind of gauge per file. `gauge` and `copies` define what each has; `gauge_optax.parts` computes its moves."""
