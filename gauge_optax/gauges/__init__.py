"""One kind of symmetry per file. `gauge` and `copies` say what a symmetry has; `gauge_optax.parts` computes."""
