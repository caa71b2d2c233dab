"""Tools to use before training: gauge lists as JSON, values by path, axes by name, and `plan`, `check` and `lora`."""

from gauge_optax.tools.as_json import from_json, to_json
from gauge_optax.tools.masks import by_path
from gauge_optax.tools.names import axes_by_name

__all__ = ["axes_by_name", "by_path", "from_json", "to_json"]
