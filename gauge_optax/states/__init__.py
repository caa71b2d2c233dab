"""How optimizer states move with a group element, and how plain states become states of `quotient`."""
