"""Gauge lists for parameter trees that people train, one call each.

Axes and captures only: every size of a model has the same list, but for lengths that share an axis (`heads=`). Each is
tested against `gauge_optax.discover` on a function with that tree (`tests/test_presets.py`); for a tree that is not
here, call `discover` on yours.
"""

from models.presets.flax_modules import flax_attention, vision_transformer
from models.presets.gemma import gemma, gemma3
from models.presets.huggingface import hf_gpt2, hf_llama
from models.presets.jax_lms import maxtext_llama, nanodo, qwen3

__all__ = [
    "flax_attention", "gemma", "gemma3", "hf_gpt2", "hf_llama", "maxtext_llama", "nanodo", "qwen3",
    "vision_transformer",
]
