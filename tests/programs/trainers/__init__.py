"""Small programs in the trainers that people use, with planted faults, each with a repaired twin, and healthy ones.

They are written as their users write them: the callback of the trainer, or `sonde.watch`, and nothing else of sonde.
"""
