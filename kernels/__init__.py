"""Attention of a few new tokens over a latent cache: references, backends and their choice."""
