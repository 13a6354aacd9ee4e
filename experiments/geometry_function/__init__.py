"""What of symmetry and directionality belongs to the function of a model, and what to the axes of its checkpoint?"""
