"""The standard analyses of a run, used by reports and lists: a verdict in words, numbers and charts."""
