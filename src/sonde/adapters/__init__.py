"""sonde inside the trainers people have: one file per foreign package, named as it is imported."""
