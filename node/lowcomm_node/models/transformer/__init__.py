"""The family of decoder-only transformers, from a demo of 230,000 parameters to several billion."""
