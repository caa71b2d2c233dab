"""Tools before and beside training: lists of gauges as JSON, values and axes by path; `plan`, `check`, `lora`."""

from gauge_optax.tools.as_json import from_json, to_json
from gauge_optax.tools.masks import by_path
from gauge_optax.tools.names import axes_by_name

__all__ = ["axes_by_name", "by_path", "from_json", "to_json"]
