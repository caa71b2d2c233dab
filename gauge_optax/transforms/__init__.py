"""One Optax transformation per file; `_common` is the plumbing they share."""
