"""Does a symmetric initialisation make encoders learn better, and how do S and D grow in training?"""
