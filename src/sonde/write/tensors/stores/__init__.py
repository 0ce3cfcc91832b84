"""One store, one file. Each has `open(run, **options) -> Store`; none knows another."""
