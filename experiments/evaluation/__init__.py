"""`python -m experiments evaluate`: language models on the tasks of paper daa."""
