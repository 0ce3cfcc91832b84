"""The command line: one file per verb. Parses, asks `Run`, prints; what a verb finds out is found out elsewhere."""
