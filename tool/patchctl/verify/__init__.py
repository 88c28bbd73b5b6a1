"""What `patchctl verify` proves: the series as text, a tree by its hashes, and a tree by what its files mean."""
