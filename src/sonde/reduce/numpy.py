"""The specification of every reducer, under its name among them; `read/` needs it too."""

from sonde.schema.specification import exponent_counts, sketch

__all__ = ["exponent_counts", "sketch"]
