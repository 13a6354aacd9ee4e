"""A base that ages: which entries are used, which are the same, which were made by another encoder."""
