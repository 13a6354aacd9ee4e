"""Do updates of W_q^T W_k become symmetric or directional, as theorems 2.3 and 2.4 say?"""
