"""What every concept shares: errors, argument checks, the version."""
