"""Which feed-forward entries of a pretrained model carry a fact?"""
