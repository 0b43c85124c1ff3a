"""The family of models that the library ``transformers`` computes."""
