"""Attention over packed rows: each token sees its own path in the tree and nothing else."""
