"""Facts of a pretrained model changed by the smallest change of the values of its entries."""
