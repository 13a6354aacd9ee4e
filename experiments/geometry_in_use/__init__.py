"""Do symmetry and directionality of a head's weights predict those among the tokens of a text?"""
