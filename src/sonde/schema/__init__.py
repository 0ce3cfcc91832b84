"""What a record is: names, the sketch and its algebra, records, windows, and the layout of a run folder. No I/O."""
