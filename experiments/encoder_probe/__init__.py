"""Does a dense bias in an encoder point from a word to the word that it depends on, and does that help?"""
