"""The dashboard's server: serves data about runs over HTTP, by default to this machine only."""
