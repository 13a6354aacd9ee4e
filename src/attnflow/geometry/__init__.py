"""In which geometry a model attends: symmetry and directionality of the bilinear form W_q^T W_k."""
