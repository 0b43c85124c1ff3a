"""The specification of a run: what its creator decides, signs, and may amend."""
