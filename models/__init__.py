"""Small models that state their own symmetries: each module has a config, a loss and `gauges(config)`."""
