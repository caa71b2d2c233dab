"""One symmetry per file; `base` is the protocol, `product` the product, underscored modules the shared kernels."""
