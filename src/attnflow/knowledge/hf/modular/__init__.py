"""A language model whose blocks read one shared knowledge base in place of feed-forward layers of their own."""
