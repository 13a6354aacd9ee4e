"""What all experiments share: jobs, resumption, one training loop, statistics, files and figures."""
