"""Whole tensors as they are stored: their names, documents, archives and addresses."""
