"""Small training programs with planted faults, each with a healthy twin. The rules are tested on them.

>>> from faults.program import programs, train
>>> sorted(p.id for p in programs() if "dead_relu" in p.labels)  # doctest: +SKIP
"""
