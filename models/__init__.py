"""Small models for examples, studies and tests. Most modules have a config, a loss, and `gauges(config)`.

The last returns the symmetries that a network of this config has, as a list of gauges.
"""
