"""Knowledge, sec. 6.2, on a pretrained model: a frozen decoder with a reader, against its rivals."""
