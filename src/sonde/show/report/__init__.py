"""One file that says how a run went: analyses as data first, then JSON, Markdown, HTML and PDF from the same data."""
