"""Knowledge, sec. 5.2: a language model with one shared base of entries beside its feed-forward twins."""
