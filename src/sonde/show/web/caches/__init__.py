"""What the dashboard keeps between requests, and works out in the background."""
