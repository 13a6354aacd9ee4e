"""What the four papers claim, and where it stands: the source of `docs/claims.md`."""
