"""Gauge lists for parameter trees that people train. One function returns the list for one kind of tree.

A list has only paths and axes, so that it fits a model of any size. Numbers are needed only if one array axis holds two
(`heads=`). Each list is tested against `gauge_optax.discover` on a function with that tree (`tests/test_presets.py`).
For other trees, call `discover` on your model.
"""

from models.presets.flax_modules import flax_attention, vision_transformer
from models.presets.gemma import gemma, gemma3
from models.presets.huggingface import hf_gpt2, hf_llama
from models.presets.jax_lms import maxtext_llama, nanodo, qwen3

__all__ = [
    "flax_attention", "gemma", "gemma3", "hf_gpt2", "hf_llama", "maxtext_llama", "nanodo", "qwen3",
    "vision_transformer",
]
