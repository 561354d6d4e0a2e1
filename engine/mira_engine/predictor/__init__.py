"""Predictor heads: which experts a later layer will need, from what an earlier one shows."""
