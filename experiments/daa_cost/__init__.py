"""DAA, sec. 5.6, Table 5: what the bias costs in parameters, operations, training throughput and decoding latency."""
