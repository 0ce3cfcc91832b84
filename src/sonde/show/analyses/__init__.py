"""The standard analyses of a run: convergence, gradient flow, overfitting and weights, each with a verdict."""
