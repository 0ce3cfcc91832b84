"""Small training programs with planted faults, each with a healthy neighbour: what the rules are tested on.

>>> from sonde.testing.faults.program import programs, train
>>> sorted(p.id for p in programs() if "dead_relu" in p.labels)  # doctest: +SKIP
"""
