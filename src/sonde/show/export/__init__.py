"""A run as files of other programs: CSV, Parquet, JSON, HDF5. One format, one file; tables go piece by piece."""
