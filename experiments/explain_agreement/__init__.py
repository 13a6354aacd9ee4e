"""How far do the readings of an answer rank what removal shows?"""
