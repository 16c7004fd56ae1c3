"""Patching transformers models so that they decode in latent space."""
