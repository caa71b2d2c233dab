"""How optimizer states move with a group element, and plain states that go on under `quotient`."""
