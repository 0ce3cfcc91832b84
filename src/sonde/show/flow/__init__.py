"""Reports of gradient-flow analyses, as text, HTML and charts."""
