"""What an analysis found, as text, JSON and HTML."""
