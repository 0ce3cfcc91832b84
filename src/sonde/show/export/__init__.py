"""Exports of a run for other programs: CSV, Parquet, JSON, HDF5. Tables are written piece by piece."""
