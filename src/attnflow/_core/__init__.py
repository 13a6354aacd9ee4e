"""The parts that every concept shares: errors, argument checks, results, handles, progress, files, the version."""
