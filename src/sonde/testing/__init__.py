"""Public helpers for testing sonde and what is built on it: models that trip an observer, and a hash of every bit."""
