"""Decoding with a draft: what is proposed, what of it is accepted, and what each model is fed; for any pair."""
