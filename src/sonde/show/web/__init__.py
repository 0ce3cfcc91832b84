"""The dashboard's server: answers questions about runs over HTTP, on this machine only unless told otherwise."""
