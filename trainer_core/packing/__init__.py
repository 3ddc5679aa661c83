"""Tree packing: samples that share a prefix are forwarded once."""
