"""Optimizer steps: hooks, parameters, hyperparameters, clipping and loss scaling."""
