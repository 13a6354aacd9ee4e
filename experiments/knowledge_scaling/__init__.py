"""Knowledge, sec. 2.2, 6.2: size of the store times size of the model."""
