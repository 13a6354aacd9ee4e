"""What single entries of a pretrained model's knowledge base do."""
