"""Knowledge, sec. 6.2: an embedding model and a language model trained together by the answers alone."""
