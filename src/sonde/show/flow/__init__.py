"""What an analysis of gradient flow found: the report, and its views as text, page and picture."""
