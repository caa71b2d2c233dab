"""Which optimizer reaches a loss in the fewest steps: a public benchmark's rule at a size that fits two CPU cores."""
