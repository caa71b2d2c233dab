"""Controlled rotation: steps that turn vectors by a chosen angle and hold their norms, with measures of both."""
