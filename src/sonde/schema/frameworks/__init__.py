"""One name and one layout for the tensors of PyTorch, Keras and Flax, and which tensors of two models correspond."""
