"""One name and one layout for the tensors of PyTorch, Keras and Flax, and the matching of tensors of two models."""
