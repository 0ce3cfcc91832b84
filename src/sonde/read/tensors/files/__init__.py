"""Files of weights as lazy tensors, one format per file. Nothing in a file is ever run."""
