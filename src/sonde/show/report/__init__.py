"""Reports of a run as one file: analyses as plain data, written as JSON, Markdown, HTML or PDF."""
