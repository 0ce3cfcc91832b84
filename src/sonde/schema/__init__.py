"""The data model: names, the sketch and its algebra, records, windows, and the layout of a run folder. No I/O."""
