"""The standard analyses of a run: a verdict in words, its numbers, its charts. Reports and lists all ask here."""
