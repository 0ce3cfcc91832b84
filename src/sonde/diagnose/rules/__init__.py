"""One fault, one file. A file here is found and registered by itself."""
