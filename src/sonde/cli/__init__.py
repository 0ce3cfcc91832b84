"""The command line, one file per verb. A verb parses its arguments, asks `Run` and prints; the logic is elsewhere."""
