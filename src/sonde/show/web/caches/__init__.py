"""The dashboard's caches between requests, and its work in the background."""
