"""What a paper does, in slice coordinates: ordinary Optax transformations, made to run inside `quotient`."""
