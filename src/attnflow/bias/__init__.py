"""How strongly a model attends: learned, content-aware biases on attention scores, and what computes them."""
