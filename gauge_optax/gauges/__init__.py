"""One symmetry per file. `instance` and `gauge` say what a symmetry has; `heads` and `matrices` are shared kernels."""
