"""A run as files of other programs: CSV, Parquet, JSON, HDF5. Tables go piece by piece."""
